"""PPO of Stable-Baselines3 on CartPole, as in its README, with a larger policy."""

from stable_baselines3 import PPO

model = PPO(
    "MlpPolicy",
    "CartPole-v1",
    device="cuda",
    verbose=1,
    policy_kwargs={"net_arch": [1024, 1024]},
    batch_size=1024,
    n_steps=2048,
)
model.learn(total_timesteps=20_000)

"""What 10,000 trials and 200 GPUs cost the driver."""

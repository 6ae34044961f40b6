from parts import rows

from package.settings import MICRO as B
from package.sub.loop import fit

accumulation_steps = 2
fit(rows, batch=B, steps=accumulation_steps)

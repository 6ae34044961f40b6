"""DeepSpeed-Chat's first step on local data: python deepspeed_chat.py SOURCE DATA ARGUMENTS."""

import runpy
import shutil
import sys
from pathlib import Path

# Its launcher puts --local_rank first.
rank = [one for one in sys.argv[1:] if one.startswith("--local_rank")]
source, data, *arguments = [one for one in sys.argv[1:] if one not in rank]
here = Path("chat")  # it reads data/ beside its package
if not here.exists():
    shutil.copytree(source, here, dirs_exist_ok=True)
    shutil.copytree(data, here / "data", dirs_exist_ok=True)
main = here.resolve() / "training/step1_supervised_finetuning/main.py"
sys.path[:0] = [str(here.resolve()), str(main.parent)]
sys.argv = [str(main), *rank, *arguments]
runpy.run_path(str(main), run_name="__main__")

"""Files that people write, damaged in every way: nothing but an answer may come of them."""

"""A byte-level transformer with hand-written backpropagation, trained on real text through cupyflash's attention."""

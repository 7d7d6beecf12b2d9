import os

# Threads of BLAS that wait for one another on a busy machine take ten times what one takes for problems of this size.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

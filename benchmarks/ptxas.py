"""What NVRTC and ptxas say of a kernel's text, without a GPU and without a cache."""

from __future__ import annotations


def compiled(text: str, name: str, arch: str) -> tuple[bool, str]:
    """Whether it compiles for `arch`, as CuPy would compile it, and the log: registers and spills if it does."""
    import cuda.pathfinder
    from cupy.cuda import nvrtc

    from cupyflash._cuda.compile import OPTIONS

    headers = cuda.pathfinder.find_nvidia_header_directory("cudart")
    program = nvrtc.createProgram(text, name, (), ())
    try:
        options = (*OPTIONS, f"-arch={arch}", f"-I{headers}", "-ftz=true", "--ptxas-options=-v")
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        return False, nvrtc.getProgramLog(program)
    log = nvrtc.getProgramLog(program)
    if "bytes spill" not in log:
        raise AssertionError(f"ptxas did not report spills: {log!r}")
    return True, log

"""Programs that use cupyflash, one idea each; run one as `python -m examples.NAME` from the repository root."""

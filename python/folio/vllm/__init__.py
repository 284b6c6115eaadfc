"""Folio as an attention backend of vLLM.

Installing the package switches it on: vLLM finds folio.vllm.plugin.register by the entry point `vllm.general_plugins`.
FOLIO_VLLM=0 switches it off. On CPUs Folio takes the place of CPU_ATTN; on NVIDIA GPUs it is the backend CUSTOM.

    plugin     registers the backend, and says in the log which attention is used and why
    backend    what vLLM asks about the backend
    builder    one step: vLLM's metadata -> folio.Batch and folio.Plan, shared by the layers of a KV cache group
    impl       one layer: writes k and v to vLLM's KV tensor in Folio's native layout, and attends
    parallel   one layer whose tokens lie on several ranks (decode context parallelism)
    selfcheck  a small problem by Folio and by vLLM's own operator

builder and impl import neither vLLM nor its classes, so that they can be tested where vLLM is not installed.
"""

TESTED_VERSIONS = ("0.32.0",)  # of vLLM; others are tried, after the self-check

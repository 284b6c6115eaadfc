"""Writes tests/data/vllm_steps.json: the metadata of the steps of a run in vLLM, for tests where vLLM is not installed.

    python record_steps.py FOLDER      FOLDER is for the checkpoint

Ten requests with prefix caching and chunked prefill: prompts in pieces, decodes, and both in one step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(ATTENTION="folio", TORCHDYNAMO_DISABLE="1")

import vllm_run  # noqa: E402  sets the environment that vLLM reads
from conftest import prompts  # noqa: E402
from vllm_models import save  # noqa: E402

from folio.vllm.builder import FolioBuilder  # noqa: E402

BLOCK_SIZE = 32
steps: list = []
prepare = FolioBuilder.prepare


def recording(self, step, kv_cache):
    if self._ready is not step:
        blocks = -(-int(step.seq_lens.max()) // BLOCK_SIZE)
        steps.append({"query_start_loc": step.query_start_loc.tolist(), "seq_lens": step.seq_lens.tolist(),
                      "block_table": step.block_table[:, :blocks].tolist(), "slot_mapping": step.slot_mapping.tolist(),
                      "num_actual_tokens": step.num_actual_tokens, "max_query_len": step.max_query_len,
                      "max_seq_len": step.max_seq_len, "causal": step.causal})
    return prepare(self, step, kv_cache)


if __name__ == "__main__":
    FolioBuilder.prepare = recording
    engine = dict(skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8,
                  max_num_batched_tokens=96, block_size=BLOCK_SIZE)
    job = dict(model=str(save("llama", Path(sys.argv[1]))), engine=engine, prompts=prompts(10, 120, 8), max_tokens=6)
    vllm_run.run(job)
    path = Path(__file__).parent.parent / "data" / "vllm_steps.json"
    numbers = sorted({b for s in steps for row in s["block_table"] for b in row})
    lines = ",\n".join(json.dumps(s, separators=(",", ":")) for s in steps)
    path.write_text(f'{{"block_size": {BLOCK_SIZE}, "num_blocks": {max(numbers) + 1}, "vllm": "0.32.0", "steps": [\n{lines}\n]}}\n')
    print(f"{len(steps)} steps, {path.stat().st_size} bytes, blocks up to {max(numbers)}")

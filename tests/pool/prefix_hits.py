#!/usr/bin/env python3
"""What a prefix cache that forgets nothing must find of a trace, from hash_ids only.

usage: prefix_hits.py TRACE [--block-size N] [--hash-block N] [--limit N]

Requests come one after another. Of each prompt the longest prefix of full blocks that an earlier
prompt had is found, leaving at least one token to compute. Prints found tokens / prompt tokens.
Written apart from `folio replay`, which must report the same with --max-seqs 1.
"""
import argparse
import json


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--hash-block", type=int, default=512)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    with open(args.trace, encoding="utf-8") as lines:
        requests = [json.loads(line) for line in lines if line.strip()][: args.limit]
    requests.sort(key=lambda r: r["timestamp"])

    prefixes = {}  # (number of the prefix before it, hash id) -> number of this prefix
    longest = {}   # prefix of whole ids -> most tokens of it that full blocks of a prompt covered
    found = total = 0
    for r in requests:
        length, at, chain = r["input_length"], 0, []
        for hash_id in r.get("hash_ids", []):
            at = prefixes.setdefault((at, hash_id), len(prefixes) + 1)
            chain.append(at)
        hit = 0
        usable = (length - 1) // args.block_size * args.block_size
        for i, prefix in enumerate(chain):  # each id continues the one before it
            reach = min(longest.get(prefix, 0), (i + 1) * args.hash_block, usable)
            if reach > hit:
                hit = reach
            if reach < (i + 1) * args.hash_block:
                break
        found += hit // args.block_size * args.block_size
        total += length
        full = length // args.block_size * args.block_size
        for i, prefix in enumerate(chain):
            longest[prefix] = max(longest.get(prefix, 0), min(full, (i + 1) * args.hash_block))
    print(f"{found / total:.9g}")


if __name__ == "__main__":
    main()

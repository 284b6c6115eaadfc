"""Writes folio/_abi.py: structs, enums, constants and functions of the C headers, as ctypes wants them.

usage: generate_abi.py PROGRAM OUTPUT     PROGRAM is the `folio` that was built together with the library

Everything comes from `PROGRAM info --abi -o json`. Sizes and offsets that ctypes computes are compared with it.
"""

import ctypes
import json
import re
import subprocess
import sys

SCALARS = {
    "int": "c_int32", "int32_t": "c_int32", "uint32_t": "c_uint32", "int64_t": "c_int64", "uint64_t": "c_uint64",
    "size_t": "c_size_t", "float": "c_float", "double": "c_double", "uint8_t": "c_uint8",
}
HEAD = '''"""Made from `folio info --abi` by tools/generate_abi.py. Do not edit."""

from ctypes import (Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64,
                    c_void_p)
'''


def ctype(text, structs, enums):
    """The ctypes expression of a C type. Pointers are c_void_p: callers pass addresses, byref() or None."""
    array = re.fullmatch(r"(\w+)\[(\d+)\]", text)
    if array:
        return f"{ctype(array[1], structs, enums)} * {array[2]}"
    if text == "const char *":
        return "c_char_p"
    if "*" in text or text in ("folio_task_fn", "folio_event_fn"):
        return "c_void_p"
    if text in enums:
        return "c_int32"
    if text in structs:
        return text
    return SCALARS[text]


def generate(abi):
    structs = {s["name"] for s in abi["structs"]}
    enums = {e["name"] for e in abi["enums"]}
    lines = [HEAD, f'VERSION = "{abi["version"]}"', ""]
    for e in abi["enums"]:
        lines += [f"# {e['name']}"] + [f"{v['name']} = {v['value']}" for v in e["values"]] + [""]
    lines += [f"{c['name']} = {c['value']!r}" for c in abi["constants"]]
    for s in abi["structs"]:
        lines += ["", "", f"class {s['name']}(Structure):", "    _fields_ = ["]
        lines += [f'        ("{f["name"]}", {ctype(f["type"], structs, enums)}),' for f in s["fields"]]
        lines += ["    ]"]
    lines += ["", "", "# name: (result, parameters)", "FUNCTIONS = {"]
    for f in abi["functions"]:
        result = "None" if f["returns"] == "void" else ctype(f["returns"], structs, enums)
        parameters = ", ".join(ctype(p["type"], structs, enums) for p in f["parameters"])
        lines += [f'    "{f["name"]}": ({result}, [{parameters}]),']
    return "\n".join(lines + ["}", ""])


def compare(source, abi):
    """Ends with a sentence if ctypes lays a struct out differently from the C compiler."""
    names = {}
    exec(compile(source, "_abi.py", "exec"), names)
    for s in abi["structs"]:
        kind = names[s["name"]]
        if ctypes.sizeof(kind) != s["size"]:
            sys.exit(f"{s['name']} has {ctypes.sizeof(kind)} bytes by ctypes, {s['size']} in C")
        for f in s["fields"]:
            field = getattr(kind, f["name"])
            if (field.offset, field.size) != (f["offset"], f["size"]):
                sys.exit(f"{s['name']}.{f['name']} is at {field.offset} by ctypes, at {f['offset']} in C")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    abi = json.loads(subprocess.run([sys.argv[1], "info", "--abi", "-o", "json"], capture_output=True, text=True,
                                    check=True).stdout)
    source = generate(abi)
    compare(source, abi)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(source)


if __name__ == "__main__":
    main()

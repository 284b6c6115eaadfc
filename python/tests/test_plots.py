"""`python -m folio plot` and `report`: what is drawn is what was saved. test_report_browser.py looks at it."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest
from plots_support import REPOSITORY, TRACES, replay

from folio import plots
from folio.plots import look, page, roofline
from folio.plots.replay import Replay, Times, time_text

TALKS = [str(TRACES / "talks.jsonl"), "--hash-block", "16", "--block-size", "4"]


def case(name: str, gflops: float, gbps: float | None, ceiling: str | None, share: float | None,
         dtype: str = "f32") -> dict:
    return {"case": name, "backend": "cpu", "dtype": dtype, "kv_dtype": dtype, "gflops": gflops, "gbps": gbps,
            "share": share, "ceiling": {"name": ceiling} if ceiling else None}


# A point on the memory ceiling, one at a hundredth of it, one at the f32 ceiling, a mixed batch without a share.
BENCH = {"version": "0.4.0", "device": "A <CPU> & more",
         "ceilings": {"fma_f32_gflops": 1000, "dot_bf16_gflops": 2000, "dot_int8_gops": 4000, "read_gbps": 10},
         "results": [case("high", 20, 10, "read_gbps", 1), case("low", 0.2, 0.1, "read_gbps", 0.01, "bf16"),
                     case("full", 1000, 1, "fma_f32_gflops", 1), case("mixed", 100, 1, None, None),
                     case("pool", 100, None, None, None)]}


def lines(picture: look.Picture) -> dict:
    return {line.get_gid(): line.get_xydata().tolist() for line in picture.figure.axes[0].lines}


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "folio", *map(str, arguments)], capture_output=True, text=True)


# ---- Rooflines

def test_roof_and_points() -> None:
    drawn = lines(roofline.draw(BENCH))
    assert set(drawn) == {"memory", "fma_f32_gflops", "case0", "case1", "case2", "case3"}  # others bound no case
    (x0, y0), bend = drawn["memory"]
    assert y0 == pytest.approx(10 * x0) and bend == pytest.approx([100, 1000])
    assert drawn["fma_f32_gflops"][0] == pytest.approx([100, 1000])
    assert drawn["case0"] == [[2, 20]] and drawn["case2"] == [[1000, 1000]]


def test_roofline_as_svg(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    plots.plot(BENCH, str(file))
    text = file.read_text()
    xml.dom.minidom.parseString(text)
    for label in ("high, f32", "low, bf16", "full, f32", "mixed, f32", "memory read: 10 GB/s", "f32 FMA: 1000 GFLOP/s",
                  "f32 queries", "bf16 queries", "folio 0.4.0 bench: A &lt;CPU&gt; &amp; more"):
        assert f">{label}</text>" in text, label
    assert "<title>low, bf16: 0.2 GFLOP/s, 0.1 GB/s, 1 % of its ceiling</title>" in text
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r'@import|url\(http|href="[^#]', text)
    again = tmp_path / "again.svg"
    plots.plot(BENCH, str(again))
    assert again.read_text() == text


def test_every_colour_has_a_dark_one(tmp_path: Path) -> None:
    plots.plot(BENCH, str(tmp_path / "plot.svg"))
    drawing = (tmp_path / "plot.svg").read_text().partition("</style>")[2]
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) <= set(look.LIGHT.values())
    assert len(set(look.LIGHT.values())) == len(look.LIGHT) == len(look.DARK)


def test_earlier_run() -> None:
    before = copy.deepcopy(BENCH)
    before["results"][0] |= {"gflops": 10, "gbps": 5, "threads": 9}  # the same work elsewhere
    before["results"][1] |= {"case": "gone"}
    picture = roofline.draw(BENCH, before)
    points = [line.get_xydata().tolist() for line in picture.figure.axes[0].lines if line.get_color() == look.C["soft"]]
    assert [[2, 10]] in points and [[2, 10], [2, 20]] in points and len(points) == 6
    assert "before" in [text.get_text() for text in picture.figure.legends[0].texts]


def test_terascale() -> None:
    run = plots.load(str(REPOSITORY / "docs" / "figures" / "gpu.json"))
    picture = roofline.draw(run)
    assert picture.figure.axes[0].get_title(loc="left") == "TFLOP/s"
    assert any("bf16 mma: 744.8 TFLOP/s" == text.get_text() for text in picture.figure.legends[0].texts)


# ---- Files

def test_a_killed_bench_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    text = (REPOSITORY / "docs" / "figures" / "cpu.json").read_text()
    cases = [m.end() for m in re.finditer(r"^    }", text, re.M)]
    file.write_text(text[:cases[2] + 50])
    assert len(plots.load(str(file))["results"]) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "0.4.0"}', "no JSON", "\0"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(plots.RunError, match="not a run saved by"):
        plots.load(str(file))


def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(BENCH))
    done = run("plot", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/run.svg\n", "")
    assert run("plot", file, "-o", tmp_path / "a.png").returncode == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for arguments, told in (
            (("report", file), "report: a page shows a run of 'folio replay -o json'"),
            (("plot", tmp_path / "b.json"), f"plot: {tmp_path}/b.json: No such file"),
            (("plot", file, "-o", tmp_path / "nowhere" / "a.svg"), f"plot: {tmp_path}/nowhere/a.svg: No such file"),
            (("plot", "-"), "plot: a run from standard input needs -o FILE")):
        done = run(*arguments)
        assert done.returncode == 1 and done.stderr.startswith(f"python -m folio {told}"), done.stderr
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    file.write_text(json.dumps(BENCH | {"results": BENCH["results"][4:]}))
    assert "no case has both GFLOP/s and GB/s" in run("plot", file).stderr
    assert "python -m folio report replay.json" in run("--help").stdout


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_what_is_missing_is_named(missing: str, tmp_path: Path) -> None:
    replay(tmp_path, "--limit", "2")
    program = f"import sys; sys.modules['{missing}'] = None; sys.argv = ['folio', 'report', '{tmp_path}/run.json']\n" \
        "from folio.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"python -m folio report: {missing} is not installed: pip install 'folio-attention[plot]'\n"


# ---- Replays

def test_series(tmp_path: Path) -> None:
    run = replay(tmp_path, *TALKS, "--blocks", "110", "--admit", "chunk", "--budget", "30", "--max-seqs", "7")
    r = Replay(run)
    b = r.bins()
    assert run["requests"] == 44 and run["preemptions"] > 5
    assert 256 <= r.count <= 512 and (r.count - 1) * r.width < r.clock <= r.count * r.width
    assert b["used_blocks"] + b["cached_blocks"] + b["free_blocks"] == pytest.approx([110] * r.count, rel=1e-4)
    for key in ("preemptions", "prefill_tokens", "decode_tokens", "hit_tokens", "prompt_tokens", "steps"):
        assert sum(b[key]) == pytest.approx(run[key], rel=1e-4), key
    assert 3 < max(b["running"]) <= 7 and max(b["preempted"]) > 0
    coarse = r.bins(100)
    assert sum(coarse["steps"]) == pytest.approx(run["steps"], rel=1e-4)
    assert coarse["running"][0] == pytest.approx(b["running"][:100].mean())
    assert r.mean("running") == pytest.approx(sum(b["running"] * r.seconds) / r.clock)


def test_a_gap_and_a_queue(tmp_path: Path) -> None:
    trace = tmp_path / "queue.csv"
    trace.write_text("arrival,prompt,output\n0,10,20\n0,10,20\n0,10,20\n1000,10,20\n")
    options = [str(trace), "--speed", "1", "--max-seqs", "1", "--blocks", "40"]
    r = Replay(replay(tmp_path, *options))
    b, middle = r.bins(), r.count // 2
    assert all(b[key][middle] == 0 for key in ("running", "decoding", "preempted", "waiting", "used_blocks", "steps"))
    assert b["hit_rate"][middle] != b["hit_rate"][middle] and b["hit_rate_so_far"][middle] == 0
    assert 0 < b["running"][0] < 1 and b["running"][-1] > 0
    waiting = Replay(replay(tmp_path, *options, "--limit", "3")).bins()["waiting"].tolist()
    assert waiting[0] == 2 and waiting[-1] == 0 and 1 in waiting and waiting == sorted(waiting, reverse=True)


def test_latencies(tmp_path: Path) -> None:
    run = replay(tmp_path, *TALKS, "--blocks", "2000")
    r = Replay(run)
    assert r.first.count == 44 and r.next.count == run["decode_tokens"]
    for times, key in ((r.first, "ttft_ms"), (r.next, "itl_ms")):
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            assert times.at(share) == pytest.approx(run[key][name], rel=1e-5)
    assert Times({"ms": [], "counts": []}).count == 0
    assert [time_text(ms) for ms in (0.0123, 0.9996, 12.34, 999.4, 1234, 6e5)] == \
        ["12.3 us", "1 ms", "12.3 ms", "999 ms", "1.23 s", "10 min"]


def test_page(tmp_path: Path) -> None:
    run = replay(tmp_path, *TALKS, "--blocks", "110", "--admit", "chunk", "--budget", "30")
    text = page.render(run)
    assert text.startswith("<!DOCTYPE html>") and text.endswith("</html>")
    assert text.count("<svg ") == text.count(' role="img" ') == 15 and text.count("<table>") == 6
    for part in ("<title>Replay: talks.jsonl</title>", "default-src 'none'",
                 f"{run['machine']['device']}; no attention ran", "<code>folio replay -o json --no-attention ",
                 f"a sequence was preempted: {run['preemptions']} times",
                 "<b>44</b><span>of 44, in ", "110 blocks of 4 tokens, no attention", "prefers-color-scheme: dark"):
        assert part in text, part
    assert "of attention and its scheduler only" not in text and "Interrupted" not in text
    assert not re.search(r"https?:|src=|href=\"[^#]|@import|url\([^#]", re.sub(r"http://www.w3.org/\d+/\w+", "", text))
    assert not re.search(r"\b(nan|inf)\b", text, re.I)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and set(re.findall(r'["(]#([^")]+)', text)) <= set(ids)
    figures = json.loads(re.search(r'id="data">\n(.*?)\n</script>', text, re.S)[1])
    assert set(figures["plots"]) == {"kv", "batch", "sequences", "hits"}
    assert {len(column["values"]) for columns in figures["plots"].values() for column in columns} == {figures["count"]}


def test_page_with_attention(tmp_path: Path) -> None:
    run = replay(tmp_path, *TALKS, "--blocks", "2000", "--limit", "3", "--threads", "1", attention=True)
    text = page.render(run | {"interrupted": True, "mismatched_rows": 3})
    assert re.search(r"; backend cpu, level \w+, 1 thread\n", text)
    assert "Tokens a second and latencies are of attention and its scheduler only" in text
    assert "2000 blocks of 4 tokens (3.9 MiB of bf16), 1 layer, heads 8:2 of 64" in text
    assert "Interrupted: these are the figures so far." in text and "3 verified rows were wrong." in text


def test_text_of_traces_is_text(tmp_path: Path) -> None:
    trace = tmp_path / "<img src=x onerror=alert(1)>&\"'.jsonl"
    trace.write_bytes(Path(TALKS[0]).read_bytes())
    text = page.render(replay(tmp_path, str(trace), *TALKS[1:], "--blocks", "2000"))
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;&amp;&#34;&#39;") == 3  # title, heading, command line


def test_one_token_and_an_hour(tmp_path: Path) -> None:
    trace = tmp_path / "one.csv"
    trace.write_text("arrival,prompt,output\n0,1,1\n")
    text = page.render(replay(tmp_path, str(trace)))
    assert "<b>10\u00a0ms</b><span>median" in text and "none came" in text
    rows = "".join(f"{i * 0.3},{50 + i % 977},{1 + i * 31 % 203}\n" for i in range(12000))
    trace.write_text("arrival,prompt,output\n" + rows)
    text = page.render(replay(tmp_path, str(trace), "--blocks", "2000", "--speed", "1"))
    assert len(text) < 600000
    assert text.count(">minutes by the replay's clock<") == 12 and text.count(">waiting to be admitted<") == 3


def test_curves(tmp_path: Path) -> None:
    file = tmp_path / "curves.svg"
    plots.plot(replay(tmp_path, *TALKS, "--blocks", "110", "--admit", "chunk"), str(file))
    text = file.read_text()
    xml.dom.minidom.parseString(text)
    for label in ("KV blocks", "What a step computes", "Sequences", "Prefix hits", "Latencies", "preemptions"):
        assert f">{label}</text>" in text, label

"""What is said while files come: how much of how much, how fast, how long still."""

from __future__ import annotations

from hub_model import NAME, fetched, place

from treeeagle_edge.hub import progress as hub_progress
from treeeagle_edge.hub.download import download
from treeeagle_edge.hub.repository import files_of, look_up


def test_progress_is_few_lines_in_a_file_and_many_where_they_replace_each_other(hub, tmp_path, monkeypatch):
    said: list[str] = []
    fetched(said)
    assert said[0] == "fetching model org/name from the hub"
    lines = [line for line in said if line.startswith("model.safetensors: ")]
    assert 10 <= len(lines) <= 20 and lines[0].endswith(" of 40 kB")

    class InPlace(list):
        in_place = True

        def __call__(self, message):
            self.append(message)

    lively = InPlace()
    monkeypatch.setattr(hub_progress, "_REFRESH", 0.0)
    repository = look_up(NAME)
    place("blob").unlink()
    download(repository, files_of(repository, "model"), lively)
    assert len(lively) > len(lines)


def test_the_rest_of_the_way_is_told_in_time(monkeypatch):
    said: list[str] = []
    clock = iter(range(100, 200))
    monkeypatch.setattr(hub_progress.time, "monotonic", lambda: float(next(clock)))
    meter = hub_progress.Meter(said.append, 60 * 10**9)
    meter.end(10**9)
    meter.begin("a.safetensors", 10**9)
    for _ in range(5):
        meter.chunk(10**9)
    for _ in range(12):
        meter.chunk(2 * 10**9)
    assert said[-1] == "a.safetensors: 31.0 GB of 60.0 GB, 2.2 GB/s, 13 s left", "the last ten seconds count"
    assert [hub_progress.duration(seconds) for seconds in (3, 700, 4000)] == ["3 s", "12 min", "1 h 07 min"]

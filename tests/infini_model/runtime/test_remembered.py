"""What is remembered between runs is merged, forgotten where it was wrong, and read when needed."""

from infini_model.runtime import remembered
from infini_model.runtime.remembered import KEEP_DAYS, REFRESH_DAYS, Remembered


def test_facts_of_several_processes_are_merged(tmp_path):
    ours, theirs = Remembered(tmp_path / "facts.json"), Remembered(tmp_path / "facts.json")
    ours.put("a", 1)
    theirs.put("b", [2])
    ours.save()
    theirs.save()
    assert ours.get("a") == theirs.get("a") == 1
    again = Remembered(tmp_path / "facts.json")
    assert (again.get("a"), again.get("b"), again.get("c")) == (1, [2], None)


def test_a_forgotten_fact_stays_forgotten(tmp_path):
    facts = Remembered(tmp_path / "facts.json")
    facts.put("a", 1)
    facts.save()
    facts.forget("a")
    assert facts.get("a") is None
    facts.save()
    assert facts.get("a") is None
    assert Remembered(tmp_path / "facts.json").get("a") is None


def test_the_file_is_read_when_a_fact_is_asked_for(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(remembered, "_read", lambda path: read.append(path) or {})
    facts = Remembered(tmp_path / "facts.json")
    facts.put("a", 1)
    assert facts.get("a") == 1
    assert not read
    assert facts.get("b") is None
    assert facts.get("b") is None
    assert read == [tmp_path / "facts.json"]


def test_a_fact_is_dropped_when_no_run_uses_it_any_more(tmp_path, monkeypatch):
    def on_day(days):
        monkeypatch.setattr(remembered.time, "time", lambda: days * remembered.DAY_SECONDS)
        return Remembered(tmp_path / "facts.json")

    first = on_day(1000)
    first.put("used", 1)
    first.put("unused", 1)
    first.save()
    later = on_day(1000 + REFRESH_DAYS)
    assert later.get("used") == 1
    later.save()
    last = on_day(1000 + KEEP_DAYS + 1)
    last.put("new", 1)
    last.save()
    found = on_day(1000 + KEEP_DAYS + 1)
    assert [found.get(key) for key in ("used", "unused", "new")] == [1, None, 1]

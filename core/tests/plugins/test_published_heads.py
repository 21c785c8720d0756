"""Heads that distributions carry: found by entry points, faults passed over."""

import logging

from specdecode.plugins import published_heads

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


def carry(folder, name, body):
    """A distribution ``name`` whose module gives heads by ``body``."""
    (folder / f"{name}.py").write_text(f"def heads(fingerprint):\n    {body}\n")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(name=name))
    (info / "entry_points.txt").write_text(f"[specdecode.heads]\n{name} = {name}:heads\n")


def test_each_distribution_is_asked_by_the_targets_fingerprint(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    carry(tmp_path, "carries_two", "return [{'model': 'x'}, {'model': 'y'}] if fingerprint == 'abc' else []")
    carry(tmp_path, "carries_broken", "raise OSError('disk')")
    carry(tmp_path, "carries_end", "raise SystemExit('over')")
    carry(tmp_path, "carries_text", "return {'model': 'x'}")
    carry(tmp_path, "carries_one", "return [{'model': fingerprint}]")
    with caplog.at_level(logging.ERROR):
        assert published_heads("abc") == [{"model": "abc"}, {"model": "x"}, {"model": "y"}]
        assert published_heads("else") == [{"model": "else"}]
    assert "heads of carries_broken (carries_broken:heads): OSError: disk" in caplog.text
    assert "must give a list of speculative_config mappings, got {'model': 'x'}" in caplog.text
    assert "heads of carries_end (carries_end:heads): SystemExit: over" in caplog.text

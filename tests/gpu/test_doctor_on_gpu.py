"""The examination of a machine with a GPU: everything but speed, which other tests at the same time disturb."""

from __future__ import annotations

from mhckit.doctor import examine
from mhckit.doctor.paths import KERNELS
from mhckit.testing import OPERATORS


def test_nothing_fails() -> None:
    findings = {finding.name: finding for finding in examine()}
    wrong = {name: finding.seen for name, finding in findings.items() if finding.status == "failed" and name != "speed"}
    assert not wrong
    assert all(findings[operator].values["path"] == KERNELS for operator in OPERATORS)
    assert findings["copy"].values["terabytes_per_second"] > 0
    assert 0 < findings["speed"].values["of_ceiling"] < 1.2

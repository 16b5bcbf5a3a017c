"""A container's memory: its limit and its use, in both versions of control groups."""

import pytest

from memcallback.core.control_groups import GroupMemory, group_memory
from memcallback.core.units import GiB, MiB

NO_LIMIT = 9223372036854771712


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Makes the kernel's files: the process's groups, and (limit, usage, file pages) by folder."""
    monkeypatch.setattr("memcallback.core.control_groups._ROOT", tmp_path)

    def make(lines, groups):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(lines)
        for name, (limit, used, file_pages) in groups.items():
            folder = tmp_path / "sys/fs/cgroup" / name
            folder.mkdir(parents=True, exist_ok=True)
            is_first = name.startswith("memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if not is_first:
                names = ("memory.max", "memory.current", "inactive_file")
            (folder / names[0]).write_text(f"{limit}\n")
            (folder / names[1]).write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {file_pages}\nslab 1\n")

    return make


def test_a_container_of_version_2_sees_its_own_group_as_the_top(system):
    system("0::/\n", {"": (8 * GiB, 3 * GiB, GiB)})
    assert group_memory() == GroupMemory(8 * GiB, 2 * GiB)


def test_of_groups_within_groups_the_smallest_limit_counts(system):
    groups = {"a": (4 * GiB, 2 * GiB, 0), "a/b": (8 * GiB, GiB, 0), "a/b/c": ("max", GiB, 0)}
    system("0::/a/b/c\n", groups)
    assert group_memory() == GroupMemory(4 * GiB, 2 * GiB)


def test_a_group_of_version_1_is_found_by_the_name_that_the_kernel_gives(system):
    lines = "5:cpu,cpuacct:/x\n4:memory:/slurm/job_7\n0::/\n"
    system(lines, {"memory": (NO_LIMIT, 9 * GiB, 0), "memory/slurm/job_7": (GiB, MiB, 0)})
    assert group_memory() == GroupMemory(GiB, MiB)


def test_a_container_of_version_1_has_its_group_at_the_top_whatever_its_name(system):
    system("4:memory:/docker/1e99\n", {"memory": (2 * GiB, GiB, 256 * MiB)})
    assert group_memory() == GroupMemory(2 * GiB, 768 * MiB)


@pytest.mark.parametrize("path", ["/../../x", "/"])
def test_a_group_without_a_limit_limits_nothing(system, path):
    system(f"0::{path}\n", {"": ("max", GiB, 0)})
    assert group_memory() is None


def test_without_control_groups_nothing_limits(tmp_path, monkeypatch):
    monkeypatch.setattr("memcallback.core.control_groups._ROOT", tmp_path)
    assert group_memory() is None


def test_what_is_left_is_the_limit_less_what_is_used():
    assert GroupMemory(8 * GiB, 3 * GiB).left_bytes == 5 * GiB
    assert GroupMemory(GiB, 2 * GiB).left_bytes == 0


def test_pages_of_files_are_taken_off_where_they_are_told(system, tmp_path):
    system("0::/\n", {"": (8 * GiB, GiB, 2 * GiB)})
    assert group_memory() == GroupMemory(8 * GiB, 0)
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text("anon 5\n")
    assert group_memory() == GroupMemory(8 * GiB, GiB)

"""Each fenced block of README, docs/guide and skills/modicum/SKILL.md is run by a test, or has a
reason why none can run it here; `pytest tests/package/test_page_blocks.py -s` prints the list.

Catches: a new block that no test runs; a block whose test is gone, or reads another page.
"""

import re
import sys
from pathlib import Path

import pytest
from page_commands import blocks

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import soak

COMMANDS = "package/test_guide_commands.py::test_the_commands_of_a_page_run"
TORCHRUN = "package/test_guide_commands.py::test_the_commands_of_torchrun_run"
PLANS = "package/test_reference_page.py::test_a_plan_on_a_page_equals_the_programs_output"
HUB = "cli/test_plan_hub.py::test_the_command_of_a_page_plans"
CONFIG = "cli/test_plan_config.py::test_config_json_is_enough_for_a_plan_only"
BLOCKS = "torch/fronts/test_guide_blocks.py::test_"
WAYS = "torch/fronts/test_which_way.py::test_"
CONTEXT = WAYS + "one_context_is_around_a_script"
ENGINES = WAYS + "loaders_of_engines_and_dcp_load_the_same"
EXPORT = "cli/test_export_page.py::test_"
HOUR = "package/test_first_hour.py::test_every_command_of_the_page_works_as_shown"
KILLED = "package/test_killed_page.py::test_every_command_works_as_shown"
CLUSTERS = "package/test_cluster_pages.py::test_"
SAVES = "torch/save/test_page.py::test_the_examples_"
OUTPUT = "-: no command: "
# For each page its blocks in order: (text that the block contains, test below tests/ that runs it,
# or "-: " and a reason).
RUN_BY = {
    "README.md": [
        ("uvx modicum plan", HUB),
        ("make demo", "package/test_guide_commands.py::test_the_demo_of_readme_runs"),
        ("+with", CONTEXT),
        ("empty_parameters", WAYS + "the_lines_by_hand_of_other_pages_load"),
        ("$ modicum plan q30", PLANS),
    ],
    "docs/guide/accelerate.md": [
        ("report.print", CONTEXT),
        ("examples/accelerate_fsdp2.py", TORCHRUN),
        ("accelerator.prepare", WAYS + "scripts_train"),
        ("Trainer(", WAYS + "scripts_train"),
        ("SFTTrainer", WAYS + "scripts_train"),
        ("create_optimizer", BLOCKS + "accelerates_block_overrides_the_optimizer"),
        (
            "get_last_checkpoint",
            BLOCKS + "accelerates_block_resumes_if_there_is_a_checkpoint",
        ),
    ],
    "docs/guide/adamw.md": [
        ("clip_grad_norm_", BLOCKS + "adamws_first_block_steps"),
        ("rebind_parameters", BLOCKS + "adamws_block_on_meta_has_state_after_the_load"),
    ],
    "docs/guide/clusters.md": [
        ("SLURM_MEM_PER_NODE", CLUSTERS + "the_budget_is_slurms_limit"),
        ("#SBATCH", "-: needs Slurm; bash reads it in test_cluster_pages.py"),
        ("ray start", "-: needs Ray; bash reads it in test_cluster_pages.py"),
    ],
    "docs/guide/convert.md": [
        ("modicum convert", COMMANDS),
        ("MISMATCH", OUTPUT + "an error"),
        ("equal after rounding", OUTPUT + "differences"),
    ],
    "docs/guide/deepspeed.md": [
        ("--report forecast.html", COMMANDS),
        ("qwen3-8b", PLANS),
        ("protect(engine)", WAYS + "the_deepspeed_block_protects_and_measures"),
        ("fork ----", OUTPUT + "a drawing"),
        ("config_of", BLOCKS + "deepspeeds_callback_is_one_of_trainer"),
    ],
    "docs/guide/doctor.md": [
        ("$ modicum doctor", OUTPUT + "the machine differs; test_doctor.py runs the command"),
        ("--interval 60", COMMANDS),
    ],
    "docs/guide/engines.md": [
        ("mesh, offload_policy", ENGINES),
        ("tie_word_embeddings", ENGINES),
        ('"DIR", offload_policy, budget', ENGINES),
        ("CheckpointManager", WAYS + "torchtitans_manager_saves_and_loads_checkpoints"),
        ("ModicumReader", ENGINES),
        ("ModicumWriter", "torch/save/test_page.py::test_the_example_of_distributed_checkpoints"),
    ],
    "docs/guide/export.md": [
        ("--shard-size 5GB", EXPORT + "the_other_commands_run"),
        ("cp DIR/config.json", EXPORT + "the_other_commands_run"),
        ("import_checkpoint", EXPORT + "an_import_has_the_config_of_its_source"),
    ],
    "docs/guide/first-hour.md": [
        ("pip install", HOUR),
        ("save_pretrained", HOUR),
        ("modicum inspect", HOUR),
        ("torchrun", HOUR),
        ("modicum plan", HOUR),
        ("main()", CONTEXT),
        ("--modicum", HOUR),
        ("--steps 1", HOUR),
        ("BudgetError", HOUR),
    ],
    "docs/guide/gpus.md": [
        ("pin=True", WAYS + "the_block_for_gpus_loads_on_cpus"),
        ("--device", PLANS),
    ],
    "docs/guide/killed.md": [
        ("history", KILLED),
        ("modicum watch", KILLED),
        ("modicum doctor", KILLED),
        ("train.py attribute", KILLED),
    ],
    "docs/guide/load.md": [
        ("empty_parameters", WAYS + "the_block_by_hand_trains_and_saves"),
        ("examples/finetune_fsdp2.py", TORCHRUN),
        ("LoadRules", BLOCKS + "loads_block_adds_a_head"),
    ],
    "docs/guide/measure.md": [
        ("COMMAND ARGUMENTS", COMMANDS),
        ("the kernel killed", OUTPUT + "an error"),
        ("--compare", COMMANDS),
        ("@memory.phase", BLOCKS + "measures_blocks"),
        ("memory.draw", BLOCKS + "measures_blocks"),
        ("limit_memory", BLOCKS + "measures_marker_is_known"),
        ("memory.attribute", BLOCKS + "measures_blocks_attribute"),
        ("interval_s", BLOCKS + "measures_blocks_attribute"),
    ],
    "docs/guide/plan.md": [
        ("uvx modicum plan", HUB),
        ("modicum plan config.json", CONFIG),
        ("$ modicum plan q06", PLANS),
        ("$ modicum plan q30", PLANS),
        ("memory.held()", BLOCKS + "plans_blocks"),
        ("adamw:fp32-split", PLANS),
        ("--from", PLANS),
        ("modicum rehearse", COMMANDS),
    ],
    "docs/guide/save.md": [
        ("extra_per_rank", SAVES + "save_and_resume"),
        ("COMMIT", SAVES + "of_a_restart"),
        ("SaveOnSigtermCallback", SAVES + "of_preemption"),
        ("modicum verify", COMMANDS),
        ("modicum rehearse", COMMANDS),
    ],
    "docs/guide/tensor-parallel.md": [
        (
            "parallelize_module",
            "torch/load/test_tensor_parallel_example.py::test_the_block_of_the_page_loads",
        ),
        ("examples/tensor_parallel.py", TORCHRUN),
        ("--tp-rowwise", PLANS),
    ],
    "docs/guide/which-way.md": [],
    "docs/guide/workers.md": [
        ('fork="shared"', BLOCKS + "workers_block_shares_the_parameters"),
        ("excluded", OUTPUT + "a drawing"),
    ],
    "skills/modicum/SKILL.md": [
        ("modicum plan", CLUSTERS + "the_commands_of_the_skill_run"),
        ("main()", CONTEXT),
        ("empty_parameters", WAYS + "the_lines_by_hand_of_other_pages_load"),
        ("modicum.torch.resume", BLOCKS + "the_skills_block_resumes_if_there_is_a_checkpoint"),
    ],
}
SOAKED = re.compile(r"@(?:pytest\.mark\.soak|SOAK)\b|marks=(?:pytest\.mark\.soak|SOAK)")


def parts() -> dict[str, str]:
    """The soak part of each test file that a part names."""
    return {file: name for name, part in soak.PARTS.items() for file in part.tests}


def test_each_page_is_listed(root: Path) -> None:
    guides = {f"docs/guide/{path.name}" for path in (root / "docs/guide").glob("*.md")}
    assert {"README.md", "skills/modicum/SKILL.md"} | guides == {*RUN_BY}


@pytest.mark.parametrize("page", RUN_BY)
def test_each_block_has_its_test(root: Path, page: str) -> None:
    found = [text for *_, text in blocks(root / page)]
    assert len(found) == len(RUN_BY[page]), f"{page}: {len(found)} blocks"
    for text, (holds, by) in zip(found, RUN_BY[page], strict=True):
        assert holds in text, f"{page}: the block of {by} has no {holds!r}:\n{text}"
        if by.startswith("-: "):
            print(f"{page} | {holds} | {by[3:]}")
            continue
        file, _, name = by.partition("::")
        source = (root / "tests" / file).read_text()
        assert f"\ndef {name}" in source, f"{page}: no test {by}"
        assert Path(page).stem in source, f"{page}: {file} does not read the page"
        marks = source[: source.index(f"\ndef {name}")].rpartition("\n\n\n")[2]
        is_soak = "pytestmark = [\n    pytest.mark.soak" in source or SOAKED.search(marks)
        part = f", soak: {parts().get(f'tests/{file}', soak.REST)}" if is_soak else ""
        print(f"{page} | {holds} | tests/{by}{part}")


def test_readme_in_chinese_has_the_same_code(root: Path) -> None:
    """But for comments and the output of plans, which test_reference_page.py compares."""
    pages = [[*blocks(root / name)] for name in ("README.md", "README.zh.md")]
    bare = [[re.sub(r" *#.*", "", text) for *_, text in page] for page in pages]
    assert bare[0] == bare[1]

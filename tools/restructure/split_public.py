#!/usr/bin/env python3
"""Moves public headers to include/tessera/ and private code into tessera::internal.

    tools/restructure/split_public.py

Repeatable: what is moved already stays as it is, so that it serves files which are added meanwhile.
"""
import re
import subprocess
from pathlib import Path

PUBLIC = {
    "core/comm/communicator.h": "communicator.h",
    "core/comm/host_results.h": "host_results.h",
    "core/comm/watchdog/wait_report.h": "wait_report.h",
    "core/gradients/grad_norm.h": "grad_norm.h",
    "core/gradients/gradient_source.h": "gradient_source.h",
    "core/launch/launch.h": "launch.h",
    "core/layout/visit_tensors.h": "visit_tensors.h",
    "core/layout/tensor_holders.h": "detail/tensor_holders.h",
    "core/memory/peak_memory.h": "peak_memory.h",
    "core/model/data_parallel.h": "data_parallel.h",
    "core/model/distributed_sampler.h": "distributed_sampler.h",
    "core/model/memory_report.h": "memory_report.h",
    "core/model/model_shards.h": "model_shards.h",
    "core/model/stateful.h": "stateful.h",
    "core/model/uneven_data.h": "uneven_data.h",
    "core/runtime/operation_handle.h": "detail/operation_handle.h",
    "core/runtime/scope.h": "scope.h",
    "core/trace/event_writer.h": "event_writer.h",
    "fsdp/converted_inputs.h": "detail/converted_inputs.h",
    "fsdp/full_parameters.h": "summon_options.h",
    "fsdp/fully_sharded_data_parallel.h": "fsdp.h",
    "fsdp/fully_sharded_module.h": "fully_sharded_module.h",
    "fsdp/options.h": "fsdp_options.h",
    "offload/activations/activation_offload.h": "activation_offload.h",
    "offload/activations/checkpointed.h": "checkpointed.h",
    "offload/activations/saved_inputs.h": "detail/saved_inputs.h",
    "offload/cpu_offload.h": "cpu_offload.h",
    "optim/adafactor.h": "adafactor.h",
    "optim/adamw_8bit.h": "adamw_8bit.h",
    "optim/averages.h": "averages.h",
    "optim/ema.h": "ema.h",
    "optim/fused_optimizers.h": "fused_optimizers.h",
    "optim/host/host_adam.h": "host_adam.h",
    "optim/lamb.h": "lamb.h",
    "optim/lbfgs.h": "lbfgs.h",
    "optim/lion.h": "lion.h",
    "optim/muon.h": "muon.h",
    "optim/quantized/quantize_linears.h": "quantize_linears.h",
    "optim/schedule_free.h": "schedule_free.h",
    "optim/sharded_grad_scaler.h": "sharded_grad_scaler.h",
    "optim/state/listed.h": "detail/listed.h",
    "optim/state/listed_optimizer.h": "detail/listed_optimizer.h",
    "optim/state/optimizer_state_dict.h": "optimizer_state_dict.h",
    "optim/state/parameter_groups.h": "parameter_groups.h",
    "optim/state/parameter_parts.h": "detail/parameter_parts.h",
    "optim/state/partial_step.h": "detail/partial_step.h",
    "optim/step_in_backward.h": "step_in_backward.h",
    "oss/oss.h": "oss.h",
    "oss/oss_offload.h": "oss_offload.h",
    "oss/oss_options.h": "oss_options.h",
    "oss/sharded_optimizer.h": "sharded_optimizer.h",
    "sdp/replicated/distributed_data_parallel.h": "ddp.h",
    "sdp/replicated/replicated_module.h": "replicated_module.h",
    "sdp/replicated/sync_batch_norm.h": "sync_batch_norm.h",
    "sdp/sharded_data_parallel.h": "sdp.h",
    "checkpoint/checkpoint.h": "checkpoint.h",
    "checkpoint/full_file/full_file.h": "full_file.h",
    "checkpoint/options.h": "checkpoint_options.h",
    "checkpoint/state/training_state.h": "training_state.h",
    "checkpoint/storage/folder_lock.h": "folder_lock.h",
    "exported/module/exported_module.h": "exported.h",
    "exported/module/value.h": "exported_value.h",
    "plan/record/decoder.h": "plan/decoder.h",
    "plan/record/dry_run.h": "plan/dry_run.h",
    "plan/record/planned_model.h": "plan/planned_model.h",
    "plan/record/run_record.h": "plan/run_record.h",
    "plan/record/training_choice.h": "plan/training_choice.h",
    "plan/calibrate/machine_speed.h": "plan/machine_speed.h",
    "plan/report/measured_step.h": "plan/measured_step.h",
    "plan/report/memory_plan.h": "plan/memory_plan.h",
    "plan/report/timeline_page.h": "plan/timeline_page.h",
    "plan/simulate/step_time.h": "plan/step_time.h",
}
# Replaced by others: what includes them includes these.
REPLACED = {
    "core/comm/errors.h": "<tessera/errors.h>",
    "checkpoint/format/errors.h": "<tessera/errors.h>",
    "exported/errors.h": "<tessera/errors.h>",
    "core/comm/pending.h": "<tessera/communicator.h>",
    "core/memory/memory_kind.h": '"core/memory/memory_kind_scope.h"',
    "include/tessera/zero_options.h": "<tessera/zero.h>",
    "include/tessera/stage_wrapper.h": "<tessera/zero.h>",
}
FOLDERS = "core fsdp oss sdp offload optim checkpoint exported plan".split()
# Sources that define what public headers declare, beside those with the stem of such a header.
PUBLIC_SOURCES = """core/launch/spawn_local.cpp checkpoint/full_file/full_load.cpp checkpoint/full_file/full_save.cpp
    plan/calibrate/speed_file.cpp core/comm/communicator.cpp""".split()
TEXT = {".h", ".cpp", ".cu", ".md", ".cmake", ".txt", ".sh", ".py", ".json"}


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.split("\n")


def tracked():
    return [name for name in git("ls-files", "-co", "--exclude-standard") if name and Path(name).is_file()]


def include_of(path):
    if path in PUBLIC:
        return f"<tessera/{PUBLIC[path]}>"
    return REPLACED.get(path, f'"{path}"')


def rewrite_paths(text, is_markdown):
    text = re.sub(r'#include "((?:%s|include)/[^"]+)"' % "|".join(FOLDERS), lambda m: "#include " + include_of(m.group(1)), text)
    lines, seen = [], set()  # two that were replaced by one
    for line in text.split("\n"):
        if line.startswith("#include"):
            if line in seen:
                continue
            seen.add(line)
        lines.append(line)
    text = "\n".join(lines)
    names = "|".join(re.escape(old) for old in sorted(PUBLIC, key=len, reverse=True))
    return re.sub(rf'(?<![\w/"-])({names})(?![\w/-])', lambda m: "include/tessera/" + PUBLIC[m.group(1)], text)


def main():
    for old, new in PUBLIC.items():
        if Path(old).is_file():
            target = Path("include/tessera", new)
            target.parent.mkdir(parents=True, exist_ok=True)
            git("mv", old, str(target))
    public_stems = {old[:-2] for old in PUBLIC}
    for name in tracked():
        path = Path(name)
        if path.suffix not in TEXT or name.startswith(("tools/restructure/", "examples/data/")):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        changed = rewrite_paths(text, path.suffix == ".md")
        folder = name.split("/")[0]
        if path.suffix in (".h", ".cpp") and folder in FOLDERS:
            if path.suffix == ".cpp" and (name[:-4] in public_stems or name in PUBLIC_SOURCES):
                if "using namespace internal;" not in changed:
                    changed = re.sub(r"^namespace tessera \{\n", "namespace tessera {\nusing namespace internal;\n", changed, count=1, flags=re.M)
            else:
                changed = re.sub(r"^namespace tessera \{", "namespace tessera::internal {", changed, flags=re.M)
                changed = re.sub(r"^\}  // namespace tessera$", "}  // namespace tessera::internal", changed, flags=re.M)
                changed = changed.replace("namespace tessera::visit_tensors_detail", "namespace tessera::internal")
        if changed != text:
            path.write_text(changed)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Moves the library's files to the tree of docs/architecture.md and rewrites the paths that name them.

    tools/restructure/move_files.py

Changes nothing but places and paths: git mv of each file, `#include "tessera/<old>"` to `#include "<new>"`, and the
paths in documentation, comments and lists. Prints the files that it does not know.
"""
import re
import subprocess
from pathlib import Path

# New folder: the old files, by stem; a stem means its .h and its .cpp.
FOLDERS = {
    "core/runtime": "async/in_time async/operation_handle async/parallel_over async/stream_uses async/task_queue "
                    "offload/copy_engine storage/file memory/thread_scope flat/scope flat/quiet flat/lazy_values "
                    "flat/bits_dtype",
    "core/memory": "memory/container_limits memory/counted_buffers memory/cuda_page_locked memory/disk_bytes "
                   "memory/free_memory memory/memory_cache memory/memory_kind memory/no_cuda_page_locked "
                   "memory/page_locked memory/peak_memory memory/pinned_pool memory/without_data",
    "core/trace": "trace/append_all trace/event_writer trace/merge_traces trace/trace trace/trace_file",
    "core/comm": "comm/agreement comm/backend_all_reduce comm/backends comm/collective comm/communicator "
                 "comm/descriptors comm/errors comm/fingerprint comm/group_process comm/host_results "
                 "comm/interruptible_store comm/notes comm/one_caller comm/pending comm/rank_order_sum "
                 "comm/reduce_scatter_pieces comm/reduced_report comm/traffic",
    "core/comm/gloo": "comm/gloo_collectives comm/gloo_communicator comm/gloo_connections comm/gloo_operation "
                      "comm/reduction_pipeline",
    "core/comm/nccl": "comm/nccl_backend comm/nccl_communicator comm/no_nccl_backend",
    "core/comm/shared_memory": "comm/peer_memory comm/published_memory comm/shared_board comm/shared_rounds "
                               "comm/shared_rounds_plan comm/tracer_permission",
    "core/comm/watchdog": "comm/rank_waits comm/stall_watch comm/wait_graph comm/wait_report",
    "core/launch": "launch/clock_exchange launch/device_choice launch/last_words launch/launch "
                   "launch/launch_environment launch/local_address launch/rendezvous launch/spawn_local",
    "core/paging": "paging/boxed_tensors paging/keyed_view paging/page paging/page_views paging/recomputes_later "
                   "paging/residency paging/stand_in",
    "core/layout": "flat/as_wrapped flat/bucket_pieces flat/bucket_plan flat/deferred flat/flat_layout flat/geometry "
                   "flat/int8_blocks flat/mesh flat/partition flat/shard_mark flat/shardable flat/tensor_holders "
                   "flat/unit_plan flat/visit_tensors",
    "core/gradients": "flat/backward_pass flat/binding flat/bucket_content flat/finite_check flat/grad_norm "
                      "flat/gradient_bucket flat/gradient_buffer flat/gradient_guard flat/gradient_keeper "
                      "flat/gradient_part flat/gradient_reducer flat/gradient_source flat/order_log flat/pass_reports "
                      "flat/reducer_options flat/shard_norm",
    "core/model": "flat/data_parallel flat/memory_report flat/memory_warning flat/model_shards flat/module_state "
                  "flat/stateful comm/uneven_data data/distributed_sampler",
    "fsdp": "flat/flat_parameter flat/former_memory paging/prefetch_order",
    "sdp/replicated": "sdp/copy_watch sdp/distributed_data_parallel sdp/replicated_gradients sdp/replicated_module "
                      "sdp/sync_batch_norm sdp/taken_parameters sdp/value_samples",
    "offload": "offload/cpu_offload",
    "offload/streams": "offload/simulated_link offload/stream_copy_engine offload/thread_copy_engine",
    "offload/disk": "paging/disk_pager paging/disk_space",
    "offload/activations": "recompute/activation_offload recompute/checkpointed recompute/saved_inputs",
    "optim/state": "optim/listed optim/listed_optimizer optim/optimizer_state optim/optimizer_state_dict "
                   "optim/parameter_groups optim/parameter_parts optim/partial_step",
    "optim/host": "optim/adam_kernel optim/adam_update optim/host_adam optim/host_step",
    "optim/quantized": "quantized/quantize_linears quantized/quantized_weight quantized/weight_format",
    "checkpoint/format": "checkpoint/box checkpoint/checked_json checkpoint/checksum checkpoint/entries "
                         "checkpoint/errors checkpoint/manifest checkpoint/rank_files checkpoint/safetensors_header "
                         "checkpoint/saved_tensors checkpoint/shard_writer checkpoint/slice_reader checkpoint/FORMAT",
    "checkpoint/save": "checkpoint/commit checkpoint/group_saves checkpoint/local_commit checkpoint/outcome "
                       "checkpoint/remote_commit checkpoint/save_coordinator checkpoint/save_job checkpoint/save_plan "
                       "checkpoint/saved_part",
    "checkpoint/load": "checkpoint/find_checkpoints checkpoint/load_state checkpoint/offline",
    "checkpoint/state": "checkpoint/saved_state checkpoint/training_state",
    "checkpoint/full_file": "checkpoint/full_file checkpoint/full_load checkpoint/full_save",
    "checkpoint/storage": "storage/file_lock storage/local_storage storage/memory_storage storage/no_s3 "
                          "storage/s3_client storage/s3_storage storage/storage checkpoint/folder_lock",
    "exported": "exported/errors",
    "exported/archive": "exported/archive exported/fields exported/record exported/weights",
    "exported/graph": "exported/arguments exported/compiler exported/expression exported/graph exported/guard "
                      "exported/higher_order_steps exported/linear_uses exported/numbers exported/operators "
                      "exported/steps",
    "exported/module": "exported/exported_module exported/signature exported/structure exported/value",
    "plan/record": "plan/counting_communicator plan/dry_operators plan/dry_run plan/flop plan/recorder "
                   "plan/run_record plan/shape_rules plan/planned_model plan/decoder plan/training_choice",
    "plan/simulate": "plan/collective_flow plan/core_turns plan/shared_cores plan/step_actions plan/step_time "
                     "plan/time_lanes",
    "plan/calibrate": "plan/calibrate plan/calibrate_hosts plan/calibrate_operators plan/machine_speed "
                      "plan/processor_time plan/rank_timer plan/speed_file",
    "plan/report": "plan/compare_measured plan/measured_step plan/memory_plan plan/plan_search plan/quantity_text "
                   "plan/timeline_page",
    "include/tessera": "zero/stage_wrapper zero/zero zero/zero_options tessera",
    "tools/packaging": "packaging/",
}
LIBRARY = ("async checkpoint comm data exported flat fsdp launch memory offload optim oss paging plan quantized "
           "recompute sdp storage trace zero").split()
TEXT = (".h", ".cpp", ".cu", ".md", ".cmake", ".txt", ".sh", ".py", ".json", ".supp", ".in", ".json", "")


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.split("\n")


def moves():
    """The new path of each tracked file that moves."""
    tracked = [name for name in git("ls-files") if name]
    new_folder = {stem: folder for folder, stems in FOLDERS.items() for stem in stems.split()}
    found = {}
    for name in tracked:
        if name.startswith("packaging/"):
            found[name] = "tools/" + name
        elif name.split("/")[0] in LIBRARY or name == "tessera.h":
            folder = new_folder.get(re.sub(r"\.(h|cpp|md)$", "", name))
            if folder is not None:
                found[name] = f"{folder}/{Path(name).name}"
            elif not name.endswith("CMakeLists.txt"):
                print("stays:", name)
    return {old: new for old, new in found.items() if old != new}


def rewrite(text, moved):
    headers = {old: new for old, new in moved.items() if old.endswith(".h")}

    def include(match):
        path = match.group(1)
        new = headers.get(path, path)
        return f'#include "{new}"' if not new.startswith("include/") else f'#include <{new[len("include/"):]}>'
    text = re.sub(r'#\s*include "tessera/([^"]+)"', include, text)
    # Other mentions: longest first, whole paths only.
    names = "|".join(re.escape(old) for old in sorted(moved, key=len, reverse=True) if "/" in old)
    return re.sub(rf"(?<![\w/.-])(?:tessera/)?({names})(?![\w/-])", lambda match: moved[match.group(1)], text)


def main():
    moved = moves()
    for old, new in moved.items():
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", old, new)
    for name in git("ls-files"):
        path = Path(name)
        if not name or name.startswith(("tools/restructure/", "examples/data/")) or path.suffix not in TEXT or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        changed = rewrite(text, moved)
        if changed != text:
            path.write_text(changed)


if __name__ == "__main__":
    main()

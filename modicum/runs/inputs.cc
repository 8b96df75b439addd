// The inputs of a plan in words, for its page.
#include <fmt/format.h>

#include <set>

#include "modicum/runs/runs.h"
#include "modicum/runs/state_change.h"

namespace modicum {
namespace {

std::string count_text(uint64_t count) {
  const auto number = static_cast<double>(count);
  if (number >= 1e9) return fmt::format("{:.2f} billion", number / 1e9);
  if (number >= 1e6) return fmt::format("{:.2f} million", number / 1e6);
  return fmt::format("{}", count);
}

std::string model_text(const RunFlags& flags, const Checkpoint& checkpoint) {
  const size_t end = flags.directory.find_last_not_of('/') + 1;  // 0 for "/"
  uint64_t elements = 0;
  for (const StoredTensor& tensor : checkpoint.manifest.tensors) {
    elements += static_cast<uint64_t>(numel_of(tensor.spec.shape));
  }
  const std::string& type = checkpoint.config.model_type;
  return fmt::format("{}{}, {} parameters", printable(base_name(flags.directory.substr(0, end))),
                     type.empty() ? "" : fmt::format(" ({})", printable(type)),
                     count_text(elements));
}

std::string dtype_text(const RunFlags& flags, const Manifest& manifest) {
  std::set<std::string_view> stored;
  for (const StoredTensor& tensor : manifest.tensors) stored.insert(torch_name(tensor.spec.dtype));
  const std::string names = fmt::format("{}", fmt::join(stored, ", "));
  const auto dtype = dtype_flag(flags.dtype);
  if (!dtype) return fmt::format("as stored: {}", names);
  const std::string kept =
      flags.keep_fp32.empty()
          ? ""
          : fmt::format(", float32 where --keep-fp32 '{}' matches", printable(flags.keep_fp32));
  return fmt::format("{}{}; stored as {}", torch_name(*dtype), kept, names);
}

std::string ranks_text(const RunFlags& flags) {
  const int nodes = nodes_of(flags);
  if (nodes == 1) return fmt::format("{} on 1 node", flags.ranks);
  return fmt::format("{} on {} nodes, {} per node", flags.ranks, nodes, *flags.ranks_per_node);
}

std::string layout_text(const RunFlags& flags) {
  std::string text = flags.layout;
  if (!flags.mesh.empty()) text += fmt::format(", mesh {}", printable(flags.mesh));
  if (!flags.expert_mesh.empty()) {
    text += fmt::format(", expert mesh {}", printable(flags.expert_mesh));
  }
  return text;
}

}  // namespace

std::vector<PageFact> inputs_of(const RunFlags& flags, const PlanFlags& of_plan, const Run& run) {
  std::vector<PageFact> facts = {{"Model", model_text(flags, run.checkpoint)},
                                 {"Dtype", dtype_text(flags, run.checkpoint.manifest)},
                                 {"Optimizer", optimizer_text(run)},
                                 {"Ranks", ranks_text(flags)},
                                 {"Strategy", flags.strategy},
                                 {"Layout", layout_text(flags)}};
  const DeepSpeedFlags& deepspeed = of_plan.deepspeed;
  if (deepspeed.config.empty()) return facts;
  facts.push_back(
      {"DeepSpeed",
       fmt::format("{}, {} per rank{}", printable(base_name(deepspeed.config)),
                   counted(static_cast<uint64_t>(deepspeed.workers),
                           deepspeed.persistent_workers ? "persistent data-loader worker"
                                                        : "data-loader worker"),
                   deepspeed.protect ? ", with modicum.torch.protect" : "")});
  return facts;
}

}  // namespace modicum

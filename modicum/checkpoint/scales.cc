// Pairs tensors of FP8 codes with their scales by name.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <unordered_map>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

constexpr std::array<std::string_view, 2> kScaleEndings = {"_scale_inv", "_scale"};

// The indices of the tensors that may be scales, by name. A hash table, since half of a large FP8
// model's tensors are scales.
using Scales = std::unordered_map<std::string_view, uint32_t>;

Scales scales_of(const Manifest& manifest) {
  Scales scales;
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    const TensorSpec& spec = manifest.tensors[i].spec;
    const auto is_ending = [&](std::string_view ending) { return spec.fqn.ends_with(ending); };
    if (is_scale_dtype(spec.dtype) &&
        std::any_of(kScaleEndings.begin(), kScaleEndings.end(), is_ending)) {
      scales.emplace(spec.fqn, static_cast<uint32_t>(i));
    }
  }
  return scales;
}

// Counts tensors of codes whose block size is not certain, for one warning.
class UncertainScales {
 public:
  void add(const StoredTensor& codes) {
    if (count_++ == 0) first_ = codes.spec.fqn;
  }
  void warn(std::string_view what, std::vector<std::string>& warnings) const {
    if (count_ == 0) return;
    warnings.push_back(fmt::format("the block size of {} {}; the first is {}",
                                   counted(count_, "FP8 tensor"), what, printable(first_)));
  }

 private:
  uint64_t count_ = 0;
  std::string first_;
};

}  // namespace

void pair_scales(Manifest& manifest, const ModelConfig& config,
                 std::vector<std::string>& warnings) {
  const auto is_coded = [](const StoredTensor& stored) { return is_fp8_code(stored.spec.dtype); };
  if (std::none_of(manifest.tensors.begin(), manifest.tensors.end(), is_coded)) return;
  const Scales scales = scales_of(manifest);
  std::string name;
  UncertainScales inferred, unknown;
  for (StoredTensor& codes : manifest.tensors) {
    if (!is_coded(codes)) continue;
    for (const std::string_view ending : kScaleEndings) {
      name.assign(codes.spec.fqn).append(ending);
      const auto found = scales.find(name);
      if (found == scales.end()) continue;
      const std::vector<int64_t>& shape = manifest.tensors[found->second].spec.shape;
      auto block = block_of(codes.spec.shape, shape, config.weight_block_size);
      if (!block && !config.block_size_fault) {
        block = likely_block(codes.spec.shape, shape);
        if (block) inferred.add(codes);
      }
      if (!block) unknown.add(codes);
      codes.scale = BlockScale{found->second, block.value_or(MatrixSize{0, 0})};
      break;
    }
  }
  inferred.warn("is taken from shapes: config.json gives none that fits", warnings);
  unknown.warn("is unknown; they can be loaded only as codes", warnings);
}

}  // namespace modicum

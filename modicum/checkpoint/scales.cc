// Which tensor holds the scales of which codes: names tell.
#include <algorithm>
#include <array>
#include <unordered_map>

#include "modicum/checkpoint/parts.h"

namespace modicum {
namespace {

constexpr std::array<std::string_view, 2> kScaleEndings = {"_scale_inv", "_scale"};

// What may be a scale, by name. Half of a large model's tensors are scales: each name is looked at
// once.
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

}  // namespace

void pair_scales(Manifest& manifest, const std::optional<MatrixSize>& block_size) {
  const auto is_coded = [](const Stored& stored) { return is_fp8_code(stored.spec.dtype); };
  if (std::none_of(manifest.tensors.begin(), manifest.tensors.end(), is_coded)) return;
  const Scales scales = scales_of(manifest);
  std::string name;
  for (Stored& codes : manifest.tensors) {
    if (!is_coded(codes)) continue;
    for (const std::string_view ending : kScaleEndings) {
      name.assign(codes.spec.fqn).append(ending);
      const auto found = scales.find(name);
      if (found == scales.end()) continue;
      const std::vector<int64_t>& shape = manifest.tensors[found->second].spec.shape;
      const auto block = block_of(codes.spec.shape, shape, block_size);
      codes.scale = BlockScale{found->second, block.value_or(MatrixSize{0, 0})};
      break;
    }
  }
}

}  // namespace modicum

// What the casts of a load lose, counted by the load and by a naive reference.
// Catches: the product of a code and a zero scale counts as an underflow; the index of an overflow
// in a transposed tensor is that of its source.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "modicum/io/file_doubles.h"
#include "modicum/kernels/kernels.h"
#include "modicum/ranks/board_double.h"
#include "modicum/stream/fake_device_double.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

constexpr int64_t kRows = 200, kColumns = 300, kBlock = 128, kScaleColumns = 3;
constexpr const char* kConfig = R"({"quantization_config":{"weight_block_size":[128,128]}})";

// One tensor of random bits for each dtype that is cast, NaNs and infinities included, and scales
// that are ordinary, zero, denormal, huge, infinite and NaN.
struct Model {
  MemoryFileSystem files;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<float> scales = {1.F, 0.F, 1e-42F, 3e38F, INFINITY, NAN};
  Checkpoint checkpoint;
  Recipe recipe;

  explicit Model(DType to) {
    std::vector<TensorSpec> specs;
    for (const DType dtype :
         {DType::f32, DType::bf16, DType::f16, DType::f8_e4m3, DType::f8_e5m2}) {
      specs.push_back(
          {std::string(torch_name(dtype)) + ".weight", Role::param, dtype, {kRows, kColumns}});
      if (!is_fp8_code(dtype)) continue;
      specs.push_back({specs.back().fqn + "_scale_inv", Role::param, DType::f32, {2, 3}});
    }
    files.make_directory("/m");
    files.put("/m/config.json", kConfig);
    SafetensorsWriter writer(files, "/m/model.safetensors", specs);
    for (size_t t = 0; t < specs.size(); ++t) {
      auto& tensor_bytes = bytes.emplace_back(bytes_of(specs[t].dtype, numel_of(specs[t].shape)));
      synth_fill(t, DType::u8, 0, static_cast<int64_t>(tensor_bytes.size()), tensor_bytes.data());
      if (specs[t].shape[0] == 2)
        std::memcpy(tensor_bytes.data(), scales.data(), tensor_bytes.size());
      writer.write(t, 0, tensor_bytes);
    }
    writer.finish();
    checkpoint = open_checkpoint(files, "/m");
    RecipeBuilder builder(checkpoint.manifest);
    for (const TensorSpec& spec : specs) {
      if (spec.shape[0] == 2) continue;
      const uint32_t stored = builder.stored(spec.fqn);
      builder.target(spec.fqn, stored, to);
      builder.target("transposed." + spec.fqn, builder.permute({1, 0}, stored), to);
    }
    recipe = builder.finish();
  }

  // The exact value of an element that a cast reads; NaN if one of its factors is not finite.
  double value(uint32_t stored, int64_t element) const {
    const DType dtype = checkpoint.manifest.tensors[stored].spec.dtype;
    const double value = value_at(bytes_named(stored).data(), dtype, element);
    if (!is_fp8_code(dtype)) return value;
    const int64_t row = element / kColumns, column = element % kColumns;
    const double scale = scales[row / kBlock * kScaleColumns + column / kBlock];
    return std::isfinite(value) && std::isfinite(scale) ? value * scale : std::nan("");
  }

 private:
  // Tensors in the file have another order than `bytes`, which is that of the dtypes.
  const std::vector<std::byte>& bytes_named(uint32_t stored) const {
    const DType dtype = checkpoint.manifest.tensors[stored].spec.dtype;
    if (dtype == DType::f8_e5m2) return bytes[5];
    if (dtype == DType::f8_e4m3) return bytes[3];
    return bytes[dtype == DType::f32 ? 0 : dtype == DType::bf16 ? 1 : 2];
  }
};

// Rounds first to fp32, as the kernels do, then compares with the halfway cases of the dtype.
RangeLoss naive_loss(const Model& model, uint32_t target, DType to) {
  const double overflows = to == DType::f16 ? 65520 : 0x1.ffp127;
  const double vanishes = to == DType::f16 ? 0x1p-25 : 0x1p-134;
  RangeLoss loss;
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    const ElementSource source = element_source(model.recipe, model.recipe.targets[target].root, i);
    const double value = model.value(source.leaf->from, source.first);
    if (!std::isfinite(value) || value == 0) continue;
    const double rounded = std::abs(static_cast<double>(static_cast<float>(value)));
    if (std::isinf(rounded) || (to != DType::f32 && rounded >= overflows)) {
      if (loss.overflowed++ == 0) {
        loss.first_index = i;
        loss.first_value = value;
        loss.first_stored = source.leaf->from;
      }
      loss.largest = std::max(loss.largest, std::abs(value));
    }
    if (rounded == 0 || (to != DType::f32 && rounded <= vanishes)) ++loss.underflowed;
  }
  return loss;
}

TEST(RangeLosses, EqualThoseOfANaiveReference) {
  for (const DType to : {DType::f16, DType::bf16, DType::f32}) {
    const Model model(to);
    int64_t overflowed = 0, underflowed = 0;
    for (const Destination destination : {Destination::cpu, Destination::copy}) {
      const Plan plan = make_plan(model.checkpoint.manifest, model.recipe, fsdp2_layout(1),
                                  {.strategy = &strategy_named("own-shard"),
                                   .destination = destination,
                                   .staging_bytes = kMinStagingBytes});
      ScriptedBoard board(1);
      Ledger ledger(plan.promise.ledger_limit_bytes(0));
      std::unique_ptr<Sink> sink;
      if (destination == Destination::cpu) {
        sink = std::make_unique<HostSink>(plan, 0, ledger);
      } else {
        sink = std::make_unique<FakeDeviceSink>(plan, 0);
      }
      RangeLosses losses;
      load(model.checkpoint, plan, {0, &board, nullptr, &ledger}, *sink,
           {.threads = 2, .losses = &losses});
      for (uint32_t t = 0; t < model.recipe.targets.size(); ++t) {
        const RangeLoss expected = naive_loss(model, t, to);
        const auto found = losses.all().find(t);
        const RangeLoss got = found == losses.all().end() ? RangeLoss{} : found->second;
        const std::string& fqn = model.recipe.targets[t].spec.fqn;
        EXPECT_EQ(got.overflowed, expected.overflowed) << fqn << torch_name(to);
        EXPECT_EQ(got.underflowed, expected.underflowed) << fqn << torch_name(to);
        EXPECT_EQ(got, expected) << fqn << " as " << torch_name(to);
        overflowed += got.overflowed;
        underflowed += got.underflowed;
      }
    }
    EXPECT_GT(overflowed, 0) << torch_name(to);
    EXPECT_GT(underflowed, 0) << torch_name(to);
  }
}

}  // namespace
}  // namespace modicum

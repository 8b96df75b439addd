// Tests of loads that dequantise FP8 codes, with ranks as threads and files in memory. The
// reference does not use the manifest's block sizes, but computes them itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

#include "modicum/io/file_doubles.h"
#include "modicum/kernels/kernels.h"
#include "modicum/plan/traffic_double.h"
#include "modicum/stream/fake_device_double.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

constexpr const char* kConfig = R"({"quantization_config":{"weight_block_size":[128,128]}})";

struct Tensor {
  TensorSpec spec;
  std::vector<std::byte> bytes;
};

// A tensor of codes with random bits, NaN and infinities included.
Tensor codes_of(std::string name, DType dtype, std::vector<int64_t> shape) {
  Tensor tensor{{std::move(name), Role::param, dtype, std::move(shape)}, {}};
  tensor.bytes.resize(static_cast<size_t>(numel_of(tensor.spec.shape)));
  synth_fill(name_hash(tensor.spec.fqn), DType::u8, 0, numel_of(tensor.spec.shape),
             tensor.bytes.data());
  return tensor;
}

// A tensor of scales with finite values.
Tensor scales_of(std::string name, DType dtype, std::vector<int64_t> shape) {
  Tensor tensor{{std::move(name), Role::param, dtype, std::move(shape)}, {}};
  const int64_t n = numel_of(tensor.spec.shape);
  tensor.bytes.resize(bytes_of(dtype, n));
  synth_fill(name_hash(tensor.spec.fqn), dtype, 0, n, tensor.bytes.data());
  if (!is_castable(dtype)) {  // E8M0 and uint8: exponents near the bias 127, and one far from it
    for (std::byte& b : tensor.bytes) b = static_cast<std::byte>(120 + static_cast<int>(b) % 14);
    tensor.bytes[0] = std::byte{0};
  }
  return tensor;
}

struct Model {
  std::map<std::string, Tensor> tensors;
  MemoryFileSystem files;
  Checkpoint checkpoint;

  // `are_apart`: the scales are in a file of their own.
  explicit Model(std::vector<Tensor> model_tensors, bool are_apart = false) {
    std::map<std::string, std::vector<const Tensor*>> files_of;
    std::vector<std::pair<std::string, std::string>> index;
    for (const Tensor& tensor : model_tensors) {
      const std::string& fqn = tensor.spec.fqn;
      const bool is_scale = are_apart && fqn.ends_with("_scale_inv");
      index.emplace_back(fqn, is_scale ? "scales.safetensors" : "model.safetensors");
      files_of[index.back().second].push_back(&tensor);
    }
    files.make_directory("/m");
    for (const auto& [file, tensors_of_file] : files_of) {
      std::vector<TensorSpec> specs;
      for (const Tensor* tensor : tensors_of_file) specs.push_back(tensor->spec);
      SafetensorsWriter out(files, "/m/" + file, specs);
      for (size_t i = 0; i < specs.size(); ++i) out.write(i, 0, tensors_of_file[i]->bytes);
      out.finish();
    }
    if (are_apart) files.put("/m/model.safetensors.index.json", index_json(index, 0));
    files.put("/m/config.json", kConfig);
    checkpoint = open_checkpoint(files, "/m");
    for (Tensor& tensor : model_tensors) tensors[tensor.spec.fqn] = std::move(tensor);
  }
};

// A model with incomplete blocks in both dims; a tensor larger than a staging slot; scales per
// tensor, row and column; stacked experts; scales of every dtype; codes without scales.
Model all_kinds() {
  using S = std::vector<int64_t>;
  constexpr DType kE4m3 = DType::f8_e4m3, kE5m2 = DType::f8_e5m2;
  std::vector<Tensor> tensors;
  using Kind = std::pair<DType, S>;
  const auto pair = [&](const std::string& name, const Kind& codes, const Kind& scales,
                        const char* ending = "_scale_inv") {
    tensors.push_back(codes_of(name, codes.first, codes.second));
    tensors.push_back(scales_of(name + ending, scales.first, scales.second));
  };
  pair("ragged.weight", {kE4m3, {200, 300}}, {DType::f32, {2, 3}});
  pair("large.weight", {kE4m3, {301, 1100}}, {DType::f32, {3, 9}});
  pair("half.weight", {kE4m3, {130, 130}}, {DType::bf16, {2, 2}});
  pair("sixteen.weight", {kE5m2, {129, 257}}, {DType::f16, {2, 3}});
  pair("bytes.weight", {kE4m3, {256, 128}}, {DType::u8, {256, 4}});
  pair("powers.weight", {kE5m2, {100, 140}}, {DType::f8_e8m0, {1, 2}});
  pair("row.weight", {kE4m3, {37, 50}}, {DType::f32, {37, 1}}, "_scale");
  pair("column.weight", {kE4m3, {37, 50}}, {DType::bf16, {1, 50}}, "_scale");
  pair("one.weight", {kE4m3, {37, 50}}, {DType::f32, {}}, "_scale");
  pair("experts.gate_up_proj", {kE4m3, {3, 200, 140}}, {DType::f32, {3, 2, 2}});
  pair("vector", {kE4m3, {300}}, {DType::f32, {3}});
  pair("none.weight", {kE4m3, {0, 300}}, {DType::f32, {0, 3}});
  tensors.push_back(codes_of("bare.weight", kE4m3, {20, 30}));
  tensors.push_back({{"norm", Role::param, DType::bf16, {33}}, std::vector<std::byte>(66)});
  return Model(std::move(tensors));
}

// A stored scale as fp32.
float widened(DType dtype, const std::byte* at) {
  if (dtype == DType::u8 || dtype == DType::f8_e8m0) {
    return std::ldexp(1.0F, static_cast<int>(*at) - 127);
  }
  float value = 0;
  cast(at, dtype, reinterpret_cast<std::byte*>(&value), DType::f32, 1);
  return value;
}

// A code's value, computed by the dequantising kernel with the scale 1.
float code_of(DType dtype, std::byte code) {
  const float scale = 1;
  float value = 0;
  dequant({&code, dtype, &scale, 0, 1}, reinterpret_cast<std::byte*>(&value), DType::f32, 1);
  return value;
}

// Element `element` of stored tensor `name`, dequantised to `to`. Along a dim, blocks have 128
// elements if that gives the number of scales in both dims, else size / number of scales.
std::vector<std::byte> number(const Model& model, const std::string& name, int64_t element,
                              DType to) {
  const Tensor& codes = model.tensors.at(name);
  const auto found = model.tensors.find(name + "_scale_inv");
  const Tensor& scales =
      found != model.tensors.end() ? found->second : model.tensors.at(name + "_scale");
  const auto dim = [](const std::vector<int64_t>& shape, size_t from_end) {
    return shape.size() < from_end ? int64_t{1} : shape[shape.size() - from_end];
  };
  const int64_t rows = dim(codes.spec.shape, 2), columns = dim(codes.spec.shape, 1);
  const int64_t grid_rows = dim(scales.spec.shape, 2), grid_columns = dim(scales.spec.shape, 1);
  const bool is_128 = (rows + 127) / 128 == grid_rows && (columns + 127) / 128 == grid_columns;
  const int64_t block_rows = is_128 ? 128 : rows / grid_rows,
                block_columns = is_128 ? 128 : columns / grid_columns;
  const int64_t matrix = element / (rows * columns);
  const int64_t row = element / columns % rows, column = element % columns;
  int64_t index = (matrix * grid_rows + row / block_rows) * grid_columns + column / block_columns;
  if (numel_of(scales.spec.shape) == 1) index = 0;
  const auto size = static_cast<size_t>(bytes_per_element(scales.spec.dtype));
  const float product =
      code_of(codes.spec.dtype, codes.bytes[static_cast<size_t>(element)]) *
      widened(scales.spec.dtype, scales.bytes.data() + static_cast<size_t>(index) * size);
  const float canonical = std::isnan(product) ? std::bit_cast<float>(0x7fc00000U) : product;
  std::vector<std::byte> out(static_cast<size_t>(bytes_per_element(to)));
  cast(reinterpret_cast<const std::byte*>(&canonical), DType::f32, out.data(), to, 1);
  return out;
}

// All elements of a target, computed by the reference.
std::vector<std::byte> whole(const Model& model, const Recipe& recipe, const Target& target) {
  std::vector<std::byte> due;
  for (int64_t i = 0; i < numel_of(target.spec.shape); ++i) {
    const ElementSource source = element_source(recipe, target.root, i);
    const std::string& name = model.checkpoint.manifest.tensors[source.leaf->from].spec.fqn;
    if (is_dequantised(recipe, target)) {
      const auto value = number(model, name, source.first, target.spec.dtype);
      due.insert(due.end(), value.begin(), value.end());
      continue;
    }
    const Tensor& stored = model.tensors.at(name);
    const auto size = static_cast<size_t>(bytes_per_element(stored.spec.dtype));
    std::vector<std::byte> value(static_cast<size_t>(bytes_per_element(target.spec.dtype)));
    cast(stored.bytes.data() + static_cast<size_t>(source.first) * size, stored.spec.dtype,
         value.data(), target.spec.dtype, 1);
    due.insert(due.end(), value.begin(), value.end());
  }
  return due;
}

using WholeTargets = std::vector<std::vector<std::byte>>;  // by target

// Stored elements for check_elements and check_values.
auto expected_of(const Model& model) {
  return [&model](uint32_t stored, int64_t first, int64_t n, std::span<std::byte> out) {
    const Tensor& tensor = model.tensors.at(model.checkpoint.manifest.tensors[stored].spec.fqn);
    const auto size = static_cast<size_t>(bytes_per_element(tensor.spec.dtype));
    ASSERT_EQ(out.size(), static_cast<size_t>(n) * size);
    std::memcpy(out.data(), tensor.bytes.data() + static_cast<size_t>(first) * size, out.size());
  };
}

// A rank's shard of a whole tensor along `dim`, in chunks of ceil(size / world).
std::vector<std::byte> cut(const std::vector<std::byte>& whole, const TensorSpec& spec, int dim,
                           int world, int rank) {
  if (spec.shape.empty()) return whole;
  const auto d = static_cast<size_t>(dim) < spec.shape.size() ? static_cast<size_t>(dim) : 0;
  const int64_t size = spec.shape[d], chunk = (size + world - 1) / world;
  const int64_t lo = std::min(size, rank * chunk), hi = std::min(size, lo + chunk);
  int64_t outer = 1, inner = bytes_per_element(spec.dtype);
  for (size_t k = 0; k < spec.shape.size(); ++k)
    (k < d ? outer : inner) *= k == d ? 1 : spec.shape[k];
  std::vector<std::byte> out;
  for (int64_t o = 0; o < outer; ++o) {
    const auto row = whole.begin() + o * size * inner;
    out.insert(out.end(), row + lo * inner, row + hi * inner);
  }
  return out;
}

struct Setting {
  const Model& model;
  const Recipe& recipe;
  const WholeTargets& wholes;
  int world;
  int dim;
};

// Loads one rank. Compares its memory and traffic with the plan, its values with the reference.
void load_one(const Setting& s, const Plan& plan, int rank, Board& board, Exchange* exchange) {
  Ledger ledger(plan.promise.ledger_limit_bytes(rank));
  std::unique_ptr<HostSink> host;
  std::unique_ptr<FakeDeviceSink> device;
  if (plan.options.destination == Destination::cpu) {
    host = std::make_unique<HostSink>(plan, rank, ledger);
    host->poison();
  } else {
    device = std::make_unique<FakeDeviceSink>(plan, rank);
  }
  Sink& sink = host ? static_cast<Sink&>(*host) : *device;
  RecordingFileSystem recorded(*s.model.checkpoint.files);
  Checkpoint checkpoint = s.model.checkpoint;
  checkpoint.files = &recorded;
  const LoadOutcome outcome =
      load(checkpoint, plan, {rank, &board, exchange, &ledger}, sink, {.threads = 2});
  Footprint promised = plan.promise.phases[kLoadPhase].of_rank[static_cast<size_t>(rank)];
  promised[Purpose::process] = promised[Purpose::page_tables] = 0;
  EXPECT_EQ(ledger.at_peak(), promised);
  const Traffic traffic = traffic_of_rank(plan, rank);
  EXPECT_EQ(outcome.storage_read_bytes, traffic.storage_read_bytes);
  EXPECT_EQ(outcome.exchanged_bytes, traffic.exchanged_bytes);
  const auto calls = recorded.calls();
  EXPECT_EQ(std::count_if(calls.begin(), calls.end(),
                          [](const IoCall& call) { return call.what == "read"; }),
            static_cast<int64_t>(traffic.reads));
  for (const uint32_t t : plan.order) {
    const TensorSpec& spec = s.recipe.targets[t].spec;
    const auto due = cut(s.wholes[t], spec, s.dim, s.world, rank);
    const std::span<const std::byte> got = host ? host->host(t) : std::span(device->buffer(t));
    ASSERT_GE(got.size(), due.size());
    ASSERT_TRUE(std::equal(due.begin(), due.end(), got.begin()))
        << spec.fqn << " as " << torch_name(spec.dtype) << ", rank " << rank << " of " << s.world
        << " along " << s.dim << ", " << plan.strategy().name << (host ? "" : ", by copies");
    check_elements(plan, {rank, t, 0, got}, expected_of(s.model));
  }
}

void load_all(const Setting& s, const Strategy& strategy, Destination destination) {
  const Plan plan = make_plan(
      s.model.checkpoint.manifest, s.recipe, fsdp2_layout(s.world, s.dim),
      {.strategy = &strategy, .destination = destination, .staging_bytes = kMinStagingBytes});
  SteadyClock clock;
  SharedBoard board(s.world, clock);
  Rings rings(plan);
  run_workers(s.world, [&](int rank) {
    try {
      const auto exchange = rings.end_of(rank, board);
      load_one(s, plan, rank, board, exchange.get());
    } catch (const Error& error) {
      board.report(record_of(error, rank));
      throw;
    }
  });
}

void expect_grid(const Model& model, const Recipe& recipe) {
  WholeTargets wholes;
  for (const Target& target : recipe.targets) {
    wholes.push_back(recipe.nodes[target.root].op == Op::alias ? std::vector<std::byte>{}
                                                               : whole(model, recipe, target));
  }
  for (const int world : {1, 2, 5}) {
    for (const int dim : {0, 1}) {
      for (const Strategy& strategy : strategies()) {
        for (const Destination destination : {Destination::cpu, Destination::copy}) {
          load_all({model, recipe, wholes, world, dim}, strategy, destination);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

// The values are right for shards that end inside blocks, incomplete blocks, every strategy, and
// the destinations `cpu` and `copy`; the ledger's peak equals the promise, and the bytes read and
// exchanged equal the plan's counts. Catches: a scale block shifted by one, rows of scales that
// were not read, a code rounded before it is scaled, a window without room for the scales.
TEST(LoadFp8, EveryKindOfScaleIsDequantised) {
  const Model model = all_kinds();
  for (const DType to : {DType::bf16, DType::f32, DType::f16}) {
    expect_grid(model, make_recipe(model.checkpoint.manifest, {.dtype = to}));
  }
}

TEST(LoadFp8, WithoutADtypeCodesAndScalesAreLoadedUnchanged) {
  const Model model = all_kinds();
  const Recipe recipe = make_recipe(model.checkpoint.manifest);
  EXPECT_EQ(recipe.targets.size(), model.tensors.size());
  expect_grid(model, recipe);
}

TEST(LoadFp8, SomeTensorsMayBeDequantisedAndOthersNot) {
  const Model model = all_kinds();
  expect_grid(model, make_recipe(model.checkpoint.manifest, {.keep_fp32 = "ragged|experts|row"}));
}

Model experts(bool are_apart = false) {
  std::vector<Tensor> tensors;
  for (int e = 0; e < 3; ++e) {
    for (const char* kind : {"gate", "up", "down"}) {
      const bool down = std::string_view(kind) == "down";
      const std::string name = "e." + std::to_string(e) + "." + kind + ".weight";
      tensors.push_back(
          codes_of(name, DType::f8_e4m3,
                   down ? std::vector<int64_t>{130, 200} : std::vector<int64_t>{200, 130}));
      tensors.push_back(scales_of(name + "_scale_inv", DType::f32, {2, 2}));
    }
  }
  return Model(std::move(tensors), are_apart);
}

// Codes that a recipe permutes, gathers and slices keep their own scales.
TEST(LoadFp8, ExpertsAreStackedTransposedAndDequantised) {
  const Model model = experts();
  RecipeBuilder b(model.checkpoint.manifest);
  const auto expert = [&](int e, const char* kind) {
    return b.stored("e." + std::to_string(e) + "." + kind + ".weight");
  };
  const auto stack = [&](const char* kind) {
    return b.stack(0, {expert(0, kind), expert(1, kind), expert(2, kind)});
  };
  b.target("gate_up", b.cat(1, {stack("gate"), stack("up")}), DType::bf16);
  b.target("down", b.permute({0, 2, 1}, stack("down")), DType::f32);
  b.target("rows", b.gather(0, {199, 0, 128, 127, 5, 6}, expert(0, "gate")), DType::f16);
  b.target("part", b.slice(1, 100, 130, expert(1, "up")), DType::bf16);
  b.target("flat", b.reshape({260, 100}, expert(2, "up")), DType::bf16);
  b.target("codes", expert(0, "down"));  // the same codes a second time, as stored
  b.target("scale", b.stored("e.0.down.weight_scale_inv"));
  b.alias("again", "gate_up");
  expect_grid(model, b.finish());
}

TEST(LoadFp8, AWrongScaleFailsTheCheck) {
  Model model = experts();
  const Recipe recipe = make_recipe(model.checkpoint.manifest, {.dtype = DType::bf16});
  const Plan plan =
      make_plan(model.checkpoint.manifest, recipe, fsdp2_layout(1),
                {.strategy = &strategy_named("own-shard"), .staging_bytes = kMinStagingBytes});
  SteadyClock clock;
  SharedBoard board(1, clock);
  Ledger ledger;
  HostSink sink(plan, 0, ledger);
  load(model.checkpoint, plan, {0, &board, nullptr, &ledger}, sink);
  check_values(plan, 0, sink, expected_of(model));
  model.tensors.at("e.1.up.weight_scale_inv").bytes[15] ^= std::byte{2};  // the last block's scale
  try {
    check_values(plan, 0, sink, expected_of(model));
    FAIL() << "expected INTEGRITY, got no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), Category::integrity);
    EXPECT_EQ(error.facts().tensor, "e.1.up.weight");
  }
}

// Before the n-th call, for every n, the scales' file is written again. This changes the file's
// identity, but no byte. Catches: a load that does not compare the file's identity after the last
// read.
TEST(LoadFp8, AFileOverwrittenAtAnyMomentIsAConflict) {
  const std::string changed = "scales.safetensors";
  Model model = experts(true);
  const Recipe recipe = make_recipe(model.checkpoint.manifest, {.dtype = DType::bf16});
  const std::string original = model.files.get("/m/" + changed);
  for (const char* strategy : {"own-shard", "node-reader"}) {
    const Plan plan =
        make_plan(model.checkpoint.manifest, recipe, fsdp2_layout(1),
                  {.strategy = &strategy_named(strategy), .staging_bytes = kMinStagingBytes});
    for (int64_t n = 1;; ++n) {
      model.files.put("/m/" + changed, original);
      Checkpoint checkpoint = open_checkpoint(model.files, "/m");
      RecordingFileSystem changing(model.files);
      changing.before_call(n, [&] { model.files.put("/m/" + changed, original); });
      checkpoint.files = &changing;
      SteadyClock clock;
      SharedBoard board(1, clock);
      Ledger ledger;
      std::optional<Error> failure;
      try {
        HostSink sink(plan, 0, ledger);
        load(checkpoint, plan, {0, &board, nullptr, &ledger}, sink);
      } catch (const Error& error) {
        failure = error;
      }
      const std::vector<IoCall> calls = changing.calls();
      if (static_cast<int64_t>(calls.size()) < n) break;
      if (calls[static_cast<size_t>(n) - 1].file != changed) continue;
      ASSERT_TRUE(failure.has_value()) << strategy << " call " << n;
      EXPECT_EQ(failure->category(), Category::conflict);
    }
  }
}

// Each file call fails once. The error is IO. If the call is a read, the error names the tensor of
// codes or of scales.
TEST(LoadFp8, EveryFailingCallIsNamed) {
  const Model model = experts();
  const Recipe recipe = make_recipe(model.checkpoint.manifest, {.dtype = DType::bf16});
  std::map<std::string, int> named;
  for (const Strategy& strategy : strategies()) {
    const Plan plan = make_plan(model.checkpoint.manifest, recipe, fsdp2_layout(1),
                                {.strategy = &strategy, .staging_bytes = kMinStagingBytes});
    for (int64_t n = 1;; ++n) {
      RecordingFileSystem failing(const_cast<MemoryFileSystem&>(model.files), n);
      Checkpoint checkpoint = model.checkpoint;
      checkpoint.files = &failing;
      SteadyClock clock;
      SharedBoard board(1, clock);
      Ledger ledger;
      std::optional<Error> failure;
      try {
        HostSink sink(plan, 0, ledger);
        load(checkpoint, plan, {0, &board, nullptr, &ledger}, sink);
      } catch (const Error& error) {
        failure = error;
      }
      EXPECT_EQ(ledger.footprint(), Footprint{});
      if (static_cast<int64_t>(failing.calls().size()) < n) break;
      const std::string call = failing.calls()[static_cast<size_t>(n) - 1].what;
      ASSERT_TRUE(failure.has_value()) << strategy.name << " call " << n << " " << call;
      EXPECT_EQ(failure->category(), Category::io);
      if (call == "read") ++named[failure->facts().tensor];
    }
  }
  EXPECT_GT(named["e.2.down.weight"], 0);
  EXPECT_GT(named["e.2.down.weight_scale_inv"], 0);
  EXPECT_EQ(named.count(""), 0U);
}

}  // namespace
}  // namespace modicum

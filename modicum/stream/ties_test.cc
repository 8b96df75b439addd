// Ties of which both tensors are stored: both are read and compared, and one is held.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <mutex>

#include "modicum/io/file_doubles.h"
#include "modicum/kernels/kernels.h"
#include "modicum/stream/fake_device_double.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

const std::string kEmbedding = "model.embed_tokens.weight";
const std::string kHead = "lm_head.weight";
using Values = std::map<std::string, std::vector<std::byte>>;

// An embedding, its head and a norm; `change` may alter the head's values before they are written.
struct Model {
  MemoryFileSystem files;
  Checkpoint checkpoint;
  uint64_t tensor_bytes = 0;  // stored size of the embedding

  explicit Model(DType dtype, const std::function<void(std::vector<std::byte>&)>& change = {},
                 bool with_head = true) {
    std::vector<TensorSpec> specs = {{kEmbedding, Role::param, dtype, {301, 6}},
                                     {"model.norm.weight", Role::param, dtype, {6}}};
    if (with_head) specs.push_back({kHead, Role::param, dtype, {301, 6}});
    files.make_directory("/m");
    SafetensorsWriter out(files, "/m/model.safetensors", specs);
    for (size_t i = 0; i < specs.size(); ++i) {
      std::vector<std::byte> bytes(bytes_of(dtype, numel_of(specs[i].shape)));
      const std::string& like = specs[i].fqn == kHead ? kEmbedding : specs[i].fqn;
      synth_fill(name_hash(like), dtype, 0, numel_of(specs[i].shape), bytes.data());
      if (specs[i].fqn == kHead && change) change(bytes);
      out.write(i, 0, bytes);
    }
    out.finish();
    checkpoint = open_checkpoint(files, "/m");
    tensor_bytes = bytes_of(dtype, 301 * 6);
  }
};

struct LoadedModel {
  uint64_t digest = 0;
  uint64_t bytes_loaded = 0;
  uint64_t storage_read_bytes = 0;
  std::optional<ErrorRecord> failure;
};

LoadedModel load_all(const Model& model, const Plan& plan, int threads = 1) {
  SteadyClock clock;
  SharedBoard board(plan.ranks(), clock);
  Rings rings(plan);
  LoadedModel loaded;
  std::mutex mutex;
  run_workers(plan.ranks(), [&](int rank) {
    try {
      const auto exchange = rings.end_of(rank, board);
      Footprint promised = plan.promise.phases[kLoadPhase].of_rank[static_cast<size_t>(rank)];
      promised[Purpose::process] = promised[Purpose::page_tables] = 0;
      Ledger ledger(promised.ledger_total());
      std::unique_ptr<HostSink> host;
      std::unique_ptr<DiscardSink> discard;
      if (plan.options.destination == Destination::cpu) {
        host = std::make_unique<HostSink>(plan, rank, ledger);
        host->poison();
      } else {
        discard = std::make_unique<DiscardSink>(plan, rank);
      }
      Sink& sink = host ? static_cast<Sink&>(*host) : *discard;
      const LoadOutcome outcome =
          load(model.checkpoint, plan, {rank, &board, exchange.get(), &ledger}, sink,
               {.threads = threads});
      const std::lock_guard lock(mutex);
      EXPECT_EQ(ledger.at_peak(), promised);
      loaded.digest += host ? digest_of_rank(plan, rank, *host) : discard->digest();
      loaded.bytes_loaded += outcome.bytes_loaded;
      loaded.storage_read_bytes += outcome.storage_read_bytes;
    } catch (const Error& error) {
      board.report(record_of(error, rank));
    }
  });
  loaded.failure = board.failure();
  return loaded;
}

Recipe tied(const Model& model, std::optional<DType> dtype = std::nullopt, bool untie = false) {
  return make_recipe(model.checkpoint.manifest,
                     {.tie_word_embeddings = true, .untie = untie, .dtype = dtype});
}

// Calls `use` with plans for every strategy, the destinations `cpu` and `copy`, and several
// layouts.
void for_each_plan(const Model& model, const Recipe& recipe,
                   const std::function<void(const Plan&)>& use) {
  std::vector<const TensorSpec*> targets;
  for (size_t t = 0; t < recipe.targets.size(); ++t) {
    targets.push_back(recipe.is_alias(t) ? nullptr : &recipe.targets[t].spec);
  }
  for (const Strategy& strategy : strategies()) {
    for (const Destination destination : {Destination::cpu, Destination::copy}) {
      for (const Layout& layout :
           {fsdp2_layout(1), fsdp2_layout(4), fsdp2_layout(3, 1), whole_layout(2),
            hsdp_layout(2, {2}), tp_fsdp_layout({2}, 2), zero3_layout(3, targets),
            flat_layout("zero1", 3, targets, false)}) {
        SCOPED_TRACE(testing::Message()
                     << strategy.name << ' ' << layout.name << ' ' << layout.world_size());
        use(make_plan(model.checkpoint.manifest, recipe, layout,
                      {.strategy = &strategy,
                       .destination = destination,
                       .staging_bytes = kMinStagingBytes}));
      }
    }
  }
}

// Both tensors are read and one is held. The digest is that of a checkpoint without the head.
TEST(Ties, EqualTiedTensorsAreReadTwiceAndHeldOnce) {
  for (const auto& [from, to] : {std::pair{DType::bf16, DType::bf16}, {DType::f32, DType::bf16}}) {
    const Model model(from);
    const Model single(from, {}, false);
    const Recipe recipe = tied(model, to);
    const Recipe of_single = tied(single, to);
    const Plan reference =
        make_plan(single.checkpoint.manifest, of_single, fsdp2_layout(1),
                  {.strategy = &strategy_named("own-shard"), .staging_bytes = kMinStagingBytes});
    const uint64_t digest = load_all(single, reference).digest;
    for_each_plan(model, recipe, [&](const Plan& plan) {
      const LoadedModel loaded = load_all(model, plan, 2);
      ASSERT_FALSE(loaded.failure.has_value()) << loaded.failure->what;
      EXPECT_EQ(loaded.digest, digest);
      EXPECT_EQ(loaded.storage_read_bytes, traffic(plan).storage_read_bytes);
      const Plan alone =
          make_plan(single.checkpoint.manifest, of_single, plan.layout, plan.options);
      EXPECT_EQ(loaded.bytes_loaded, load_all(single, alone).bytes_loaded);
      const auto& footprints = plan.promise.phases[kHoldPhase].of_rank;
      const auto& due = alone.promise.phases[kHoldPhase].of_rank;
      for (size_t r = 0; r < footprints.size(); ++r) {
        EXPECT_EQ(footprints[r][Purpose::shards], due[r][Purpose::shards]);
      }
      EXPECT_GE(loaded.storage_read_bytes, traffic(alone).storage_read_bytes + model.tensor_bytes);
    });
  }
}

void expect_differing(const Model& model, std::optional<DType> dtype) {
  const Recipe recipe = tied(model, dtype);
  for_each_plan(model, recipe, [&](const Plan& plan) {
    const LoadedModel loaded = load_all(model, plan);
    ASSERT_TRUE(loaded.failure.has_value());
    EXPECT_EQ(loaded.failure->category, Category::mismatch) << loaded.failure->what;
    EXPECT_EQ(loaded.failure->tensor, kHead);
    EXPECT_NE(std::string(loaded.failure->what).find(kEmbedding), std::string::npos);
  });
}

// One bit of the last element, which the last rank holds.
TEST(Ties, OneDifferingBitIsAMismatch) {
  const Model model(DType::f32, [](auto& bytes) { bytes[bytes.size() - 4] ^= std::byte{1}; });
  expect_differing(model, std::nullopt);
}

TEST(Ties, TwoSwappedRowsAreAMismatch) {
  const Model model(DType::bf16, [](auto& bytes) {
    std::swap_ranges(bytes.begin(), bytes.begin() + 12, bytes.begin() + 12);
  });
  expect_differing(model, DType::f32);
}

// Elements are compared as loaded, so a difference that the cast rounds away is ignored.
TEST(Ties, AreComparedAfterTheCast) {
  const Model model(DType::f32, [](auto& bytes) { bytes[bytes.size() - 4] ^= std::byte{1}; });
  for_each_plan(model, tied(model, DType::bf16),
                [&](const Plan& plan) { EXPECT_FALSE(load_all(model, plan).failure.has_value()); });
}

// With --untie both names are targets and may differ.
TEST(Ties, UntiedNamesAreTwoTargets) {
  const Model model(DType::bf16, [](auto& bytes) { bytes[0] ^= std::byte{1}; });
  const Recipe recipe = tied(model, std::nullopt, true);
  EXPECT_EQ(recipe.targets.size(), 3U);
  for_each_plan(model, recipe, [&](const Plan& plan) {
    EXPECT_TRUE(plan.ties.empty());
    EXPECT_FALSE(load_all(model, plan).failure.has_value());
  });
}

// The alias may have any recipe: here the head is stored transposed, in two parts.
TEST(Ties, AreComparedAfterTheirRecipes) {
  for (const bool right : {true, false}) {
    const Model model(DType::bf16);
    RecipeBuilder b(model.checkpoint.manifest);
    const uint32_t embedding = b.stored(kEmbedding);
    b.target("turned", b.permute({1, 0}, embedding));
    b.target("norm", b.stored("model.norm.weight"));
    const uint32_t head = b.permute({1, 0}, b.stored(kHead));
    const uint32_t upper = b.slice(0, 0, 2, head);
    const uint32_t lower = b.slice(0, 2, 6, head);
    b.alias("again", "turned", right ? b.cat(0, {upper, lower}) : b.cat(0, {lower, upper}));
    const Recipe recipe = b.finish();
    for_each_plan(model, recipe, [&](const Plan& plan) {
      const LoadedModel loaded = load_all(model, plan);
      EXPECT_EQ(loaded.failure.has_value(), !right);
    });
  }
}

// FP8 codes are compared after they were dequantised.
TEST(Ties, Fp8CodesAreComparedAfterDequantisation) {
  for (const bool right : {true, false}) {
    Model model(DType::f8_e4m3);
    std::vector<TensorSpec> specs;
    for (const char* name : {"a.weight", "b.weight"}) {
      specs.push_back({name, Role::param, DType::f8_e4m3, {301, 200}});
      specs.push_back({std::string(name) + "_scale_inv", Role::param, DType::f32, {3, 2}});
    }
    model.files.make_directory("/fp8");
    SafetensorsWriter out(model.files, "/fp8/model.safetensors", specs);
    for (size_t i = 0; i < specs.size(); ++i) {
      std::vector<std::byte> bytes(bytes_of(specs[i].dtype, numel_of(specs[i].shape)));
      synth_fill(i % 2, specs[i].dtype, 0, numel_of(specs[i].shape), bytes.data());
      if (i == 3 && !right) bytes.back() ^= std::byte{0x80};  // the sign of the last scale
      out.write(i, 0, bytes);
    }
    out.finish();
    model.files.put("/fp8/config.json",
                    R"({"quantization_config":{"weight_block_size":[128,128]}})");
    model.checkpoint = open_checkpoint(model.files, "/fp8");
    const Recipe recipe =
        make_recipe(model.checkpoint.manifest, {.text = R"({"unused": [], "targets": {
          "a": {"op":"stored","name":"a.weight","dtype":"bfloat16"},
          "b": {"op":"alias","of":"a","in":[{"op":"stored","name":"b.weight"}]}}})"});
    for_each_plan(model, recipe, [&](const Plan& plan) {
      const LoadedModel loaded = load_all(model, plan);
      ASSERT_EQ(loaded.failure.has_value(), !right);
      if (right) {
        EXPECT_EQ(loaded.storage_read_bytes, traffic(plan).storage_read_bytes);
      } else {
        EXPECT_EQ(loaded.failure->category, Category::mismatch) << loaded.failure->what;
      }
    });
  }
}

// Compared transfers are counted by Coverage, too, so that no element is left uncompared.
TEST(Ties, ComparedTransfersAreCountedByCoverage) {
  const Model model(DType::bf16);
  const Recipe recipe = tied(model);
  for_each_plan(model, recipe, [&](const Plan& plan) {
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      int64_t kept = 0;
      int64_t compared = 0;
      for_each_stored_transfer(plan, rank, [&](const Transfer& transfer) {
        EXPECT_EQ(transfer.compared, transfer.target == plan.ties[0].alias);
        if (transfer.target == plan.ties[0].target) kept += transfer.numel();
        if (transfer.compared) compared += transfer.numel();
      });
      EXPECT_GT(kept, 0);
      EXPECT_EQ(kept, compared);
    }
  });
}

}  // namespace
}  // namespace modicum

// Tests of a save: load, save, and compare the saved files with the loaded ones, with ranks as
// threads and files in memory.
#include "modicum/stream/save.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <numeric>

#include "modicum/io/file_doubles.h"
#include "modicum/kernels/kernels.h"
#include "modicum/stream/data_writer.h"
#include "modicum/stream/fake_device_double.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

constexpr uint64_t kPoint = 0x1234'5678'9abc;
using Specs = std::vector<TensorSpec>;

TensorSpec spec(std::string name, DType dtype, std::vector<int64_t> shape) {
  return {std::move(name), Role::param, dtype, std::move(shape)};
}

uint64_t digest_of_tensor(const ChunkSums& sums, uint32_t stored) {
  uint64_t digest = 0;
  for (const ChunkSum& chunk : sums.of_tensor(stored)) digest += chunk.digest;
  return digest;
}

std::vector<std::byte> values_of(const TensorSpec& tensor) {
  std::vector<std::byte> bytes(bytes_of(tensor.dtype, numel_of(tensor.shape)));
  synth_fill(name_hash(tensor.fqn), tensor.dtype, 0, numel_of(tensor.shape), bytes.data());
  return bytes;
}

void put_model(FileSystem& files, const std::string& path, const Specs& specs) {
  SafetensorsWriter out(files, path, specs);
  for (size_t i = 0; i < specs.size(); ++i) out.write(i, 0, values_of(specs[i]));
  out.finish();
}

Specs model() {
  Specs specs = {spec("scalar", DType::bf16, {}),        spec("ids", DType::i64, {7}),
                 spec("mask", DType::boolean, {3, 5}),   spec("empty", DType::bf16, {0, 3}),
                 spec("embed", DType::bf16, {331, 700}), spec("conv", DType::bf16, {70, 90}),
                 spec("qkv", DType::bf16, {12, 8}),      spec("bias", DType::f32, {19}),
                 spec("unread", DType::u8, {77})};
  for (int e = 0; e < 5; ++e) {
    for (const char* name : {"gate", "up"}) {
      specs.push_back(spec("e" + std::to_string(e) + "." + name, DType::bf16, {3, 6}));
    }
  }
  return specs;
}

// Keeps some tensors as stored; transposes, slices, stacks and concatenates others. Has an alias.
Recipe converting(const Manifest& manifest) {
  RecipeBuilder b(manifest);
  for (const char* same : {"scalar", "ids", "mask", "empty", "embed", "bias"}) {
    b.target(same, b.stored(same));
  }
  b.target("linear", b.permute({1, 0}, b.stored("conv")));
  b.target("q", b.slice(0, 0, 4, b.stored("qkv")));
  b.target("kv", b.slice(0, 4, 12, b.stored("qkv")));
  std::vector<uint32_t> gates, ups;
  for (int e = 0; e < 5; ++e) {
    gates.push_back(b.stored("e" + std::to_string(e) + ".gate"));
    ups.push_back(b.stored("e" + std::to_string(e) + ".up"));
  }
  b.target("gate_up", b.cat(1, {b.stack(0, gates), b.stack(0, ups)}));
  b.alias("head", "embed");
  b.unused("unread");
  return b.finish();
}

struct SaveResult {
  std::vector<SaveOutcome> outcomes;  // by rank
  std::vector<Footprint> peaks;       // by rank: peak of the save in excess of the loaded state
  std::map<std::string, uint64_t> digests;  // by tensor
};

// Loads with all ranks, then saves to /out.
SaveResult load_and_save(const Checkpoint& checkpoint, const Plan& plan, const SavePlan& saved,
                         FileSystem& files, int threads = 1) {
  SteadyClock clock;
  SharedBoard board(plan.ranks(), clock);
  const auto ranks = static_cast<size_t>(plan.ranks());
  SaveResult result{std::vector<SaveOutcome>(ranks), std::vector<Footprint>(ranks)};
  files.make_directory("/out");
  const std::string out = "/out";
  Gathers gathers(saved.plan());
  run_workers(plan.ranks(), [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    Ledger ledger(UINT64_MAX);
    HostSink shards(plan, rank, ledger);
    load(checkpoint, plan, {rank, &board, nullptr, &ledger}, shards);
    ledger.mark();
    const Footprint before = ledger.footprint();
    const auto gather = gathers.end_of(rank, board);
    if (gather != nullptr) gather->commit(ledger);
    const RankContext at{rank, &board, nullptr, &ledger, gather.get()};
    ChunkSums of_rank(saved.manifest(), kPoint);
    result.outcomes[r] = save({checkpoint, saved, at, shards, threads}, {files, out}, of_rank);
    result.peaks[r] = ledger.at_peak();
    for (size_t p = 0; p < before.bytes.size(); ++p) result.peaks[r].bytes[p] -= before.bytes[p];
    hand_over_sums(of_rank, rank, {files, out});
  });
  const CompletedFiles completed =
      complete_files(saved.manifest(), kPoint, plan.ranks(), {files, out});
  for (const CheckpointTensor& tensor : completed.tensors) {
    result.digests[tensor.spec.fqn] =
        std::accumulate(tensor.chunks.begin(), tensor.chunks.end(), uint64_t{0});
  }
  return result;
}

std::vector<std::byte> stored_bytes(const Checkpoint& checkpoint, const StoredTensor& stored) {
  std::vector<std::byte> bytes(stored.at.bytes());
  open_data_file(checkpoint, stored.at.file)->read(bytes, stored.at.begin);
  return bytes;
}

// Expects the tensors of `specs` in the saved checkpoint, with the values that values_of generates.
void expect_same(const Checkpoint& saved, Specs specs) {
  ASSERT_EQ(saved.manifest.tensors.size(), specs.size());
  for (const StoredTensor& stored : saved.manifest.tensors) {
    const auto spec = std::find_if(specs.begin(), specs.end(),
                                   [&](const TensorSpec& s) { return s.fqn == stored.spec.fqn; });
    ASSERT_NE(spec, specs.end()) << stored.spec.fqn;
    EXPECT_EQ(stored.spec, *spec);
    EXPECT_EQ(stored_bytes(saved, stored), values_of(*spec)) << stored.spec.fqn;
  }
}

std::vector<Layout> layouts(const Recipe& recipe) {
  std::vector<const TensorSpec*> targets;
  for (const Target& target : recipe.targets) {
    targets.push_back(recipe.is_alias(static_cast<uint32_t>(targets.size())) ? nullptr
                                                                             : &target.spec);
  }
  std::vector<Layout> all = {whole_layout(1),          whole_layout(3),
                             fsdp2_layout(2),          fsdp2_layout(4),
                             hsdp_layout(2, {2}),      fsdp2_layout(3, 1),
                             zero3_layout(3, targets), flat_layout("zero2", 4, targets, false)};
  all.push_back(tp_fsdp_layout({2}, 2));
  all.back().kind_of.assign(recipe.targets.size(), static_cast<uint8_t>(TpKind::columns));
  all.back().kind_of[4] = static_cast<uint8_t>(TpKind::rows);        // embed
  all.back().kind_of[5] = static_cast<uint8_t>(TpKind::replicated);  // bias
  return all;
}

// On one node and on nodes of two ranks. Catches: an element that is written to the wrong place,
// twice or not at all; two replicas that write the same elements; a conversion that is not
// inverted; memory beyond the promise; divided rows that each rank writes itself.
TEST(Save, SavedFilesEqualTheLoadedOnes) {
  MemoryFileSystem source;
  source.make_directory("/m");
  put_model(source, "/m/model.safetensors", model());
  const Checkpoint checkpoint = open_checkpoint(source, "/m");
  const Recipe recipe = converting(checkpoint.manifest);
  std::map<std::string, uint64_t> digests;
  for (const Layout& layout : layouts(recipe)) {
    for (const auto& [shard_bytes, per_node] :
         {std::pair(std::optional<uint64_t>(), 0), std::pair(std::optional<uint64_t>(9000), 0),
          std::pair(std::optional<uint64_t>(), 2)}) {
      SCOPED_TRACE(testing::Message() << layout.name << " nodes of " << per_node);
      const Plan plan =
          make_plan(checkpoint.manifest, recipe, layout,
                    {.strategy = &strategy_named("own-shard"), .ranks_per_node = per_node});
      const SavePlan saved(checkpoint, plan, {.shard_bytes = shard_bytes});
      MemoryFileSystem files;
      const SaveResult result = load_and_save(checkpoint, plan, saved, files, 2);
      expect_same(open_checkpoint(files, "/out"), model());
      uint64_t written = 0, read = 0, gathered = 0;
      for (const SaveOutcome& outcome : result.outcomes) {
        gathered += outcome.gathered_bytes;
        written += outcome.written_bytes;
        read += outcome.read_bytes;
      }
      uint64_t size = 0;
      for (const DataFile& file : saved.manifest().files) size += file.identity.size_bytes;
      EXPECT_EQ(written, size);
      EXPECT_EQ(read, 77U) << "expected the size of 'unread'";
      // With several ranks, rows of "conv", which is transposed, are gathered in every layout but
      // "zero2": in its flat group rank 0 has no element of "conv".
      EXPECT_EQ(gathered > 0, plan.ranks() > 1 && layout.name != "zero2");
      Footprint promised = saved.footprint();
      EXPECT_EQ(saved.plan().staging.total_bytes, plan.options.staging_bytes);
      promised[Purpose::staging] = saved.plan().staging.total_bytes;
      for (const Footprint& peak : result.peaks) EXPECT_EQ(peak, promised);
      if (digests.empty()) digests = result.digests;
      EXPECT_EQ(result.digests, digests);
    }
  }
}

// A background save, during which all memory is overwritten, writes the values from before.
// Catches: memory that is read directly instead of through the snapshot, or that was not expected;
// ranks that wait for each other; a digest of other bytes than the written ones.
TEST(Save, InTheBackgroundTheValuesAreThoseOfTheBeginning) {
  MemoryFileSystem source;
  source.make_directory("/m");
  put_model(source, "/m/model.safetensors", model());
  const Checkpoint checkpoint = open_checkpoint(source, "/m");
  const Recipe recipe = converting(checkpoint.manifest);
  const std::string out = "/out";
  for (const Layout& layout : layouts(recipe)) {
    for (const uint64_t window : {uint64_t{0}, Snapshot::kBlockBytes, 64 * kMiB}) {
      SCOPED_TRACE(testing::Message() << layout.name << " window " << window);
      PlanOptions options{.strategy = &strategy_named("own-shard")};
      const Plan loaded = make_plan(checkpoint.manifest, recipe, layout, options);
      options.destination = Destination::copy;
      const Plan read = make_plan(checkpoint.manifest, recipe, layout, options);
      const SavePlan saved(checkpoint, read, {.gathers = false});
      MemoryFileSystem files;
      files.make_directory(out);
      SteadyClock clock;
      SharedBoard board(loaded.ranks(), clock);
      ChunkSums sums(saved.manifest(), kPoint);
      run_workers(loaded.ranks(), [&](int rank) {
        Ledger ledger(UINT64_MAX);
        HostSink shards(loaded, rank, ledger);
        const RankContext at{rank, &board, nullptr, &ledger};
        load(checkpoint, loaded, at, shards);
        create_files(saved.manifest(), {files, out}, board, {rank, loaded.ranks()});
        board.barrier(rank);
        Snapshot snapshot(window);
        const uint32_t buffers = buffer_count(loaded);
        for (uint32_t b = 0; b < buffers; ++b) snapshot.cover(shards.host(b));
        snapshot.lay_out();
        expect_writes(snapshot, saved, rank, shards);
        snapshot.charge(ledger);
        run_workers(2, [&](int worker) {
          if (worker == 0) {
            save({checkpoint, saved, at, shards, 2, &snapshot}, {files, out}, sums);
            return;
          }
          for (uint32_t b = buffers; b-- > 0;) {
            snapshot.before_overwrite(shards.host(b));
            std::memset(shards.host(b).data(), 0, shards.host(b).size());
          }
        });
      });
      sums.prove();
      const Checkpoint opened = open_checkpoint(files, out);
      expect_same(opened, model());
      for (uint32_t t = 0; t < opened.manifest.tensors.size(); ++t) {
        ChunkSums of_file(saved.manifest(), kPoint);
        of_file.add(t, 0, stored_bytes(opened, saved.manifest().tensors[t]));
        EXPECT_EQ(digest_of_tensor(of_file, t), digest_of_tensor(sums, t));
      }
    }
  }
}

// Catches: elements that are fetched from the wrong place of a device's buffer, or cast from the
// wrong dtype.
TEST(Save, DeviceBuffersAreSavedThroughStaging) {
  MemoryFileSystem source;
  source.make_directory("/m");
  put_model(source, "/m/model.safetensors", model());
  const Checkpoint checkpoint = open_checkpoint(source, "/m");
  const Recipe recipe = converting(checkpoint.manifest);
  const Plan plan =
      make_plan(checkpoint.manifest, recipe, fsdp2_layout(1),
                {.strategy = &strategy_named("own-shard"), .destination = Destination::copy});
  SteadyClock clock;
  SharedBoard board(1, clock);
  Ledger ledger(UINT64_MAX);
  const RankContext at{0, &board, nullptr, &ledger};
  FakeDeviceSink device(plan, 0);
  load(checkpoint, plan, at, device);
  for (const auto dtype : {std::optional<DType>(), std::optional(DType::f32)}) {
    const SavePlan saved(checkpoint, plan, {.dtype = dtype});
    MemoryFileSystem files;
    files.make_directory("/out");
    const std::string out = "/out";
    ChunkSums sums(saved.manifest(), kPoint);
    save({checkpoint, saved, at, device}, {files, out}, sums);
    sums.prove();
    const Checkpoint opened = open_checkpoint(files, "/out");
    if (!dtype) {
      expect_same(opened, model());
      continue;
    }
    for (const StoredTensor& stored : opened.manifest.tensors) {
      if (stored.spec.fqn != "conv") continue;
      const std::vector<std::byte> before = values_of(model()[5]);  // conv
      std::vector<std::byte> expected(2 * before.size());
      cast(before.data(), DType::bf16, expected.data(), DType::f32, 70 * 90);
      EXPECT_EQ(stored_bytes(opened, stored), expected);
    }
  }
}

// The n-th file call of a save by two ranks fails, for every n.
void expect_each_failure_ends_all_ranks(const Checkpoint& checkpoint, const Plan& plan) {
  const SavePlan saved(checkpoint, plan, {.shard_bytes = 100'000});
  const std::string out = "/out";
  for (int64_t fail_at = 1;; ++fail_at) {
    MemoryFileSystem under;
    under.make_directory("/out");
    RecordingFileSystem files(under, fail_at);
    SteadyClock clock;
    SharedBoard board(2, clock);
    Gathers gathers(saved.plan());
    std::array<std::optional<Category>, 2> ended;
    run_workers(2, [&](int rank) {
      Ledger ledger(UINT64_MAX);
      HostSink shards(plan, rank, ledger);
      const auto gather = gathers.end_of(rank, board);
      const RankContext at{rank, &board, nullptr, &ledger, gather.get()};
      ChunkSums sums(saved.manifest(), kPoint);
      try {  // a rank that still loads when the other fails throws PEER
        load(checkpoint, plan, at, shards);
        save({checkpoint, saved, at, shards}, {files, out}, sums);
      } catch (const Error& error) {
        ended[static_cast<size_t>(rank)] = error.category();
      }
    });
    const bool is_failed = static_cast<int64_t>(files.calls().size()) >= fail_at;
    EXPECT_EQ(ended[0] == Category::io || ended[1] == Category::io, is_failed) << fail_at;
    for (const auto& category : ended) {
      EXPECT_TRUE(!category || *category == Category::io || *category == Category::peer) << fail_at;
    }
    if (!is_failed) break;
  }
}

// The failing call may be of either rank; dim 1 has divided rows. One rank ends with IO; the other
// ends with PEER, unless it has finished before. Catches: an error that is swallowed; a rank that
// waits forever.
TEST(SaveFault, AFailingCallEndsAllRanks) {
  MemoryFileSystem source;
  source.make_directory("/m");
  put_model(source, "/m/model.safetensors", model());
  const Checkpoint checkpoint = open_checkpoint(source, "/m");
  const Recipe recipe = converting(checkpoint.manifest);
  for (const int dim : {0, 1}) {
    const Plan plan = make_plan(checkpoint.manifest, recipe, fsdp2_layout(2, dim),
                                {.strategy = &strategy_named("own-shard")});
    expect_each_failure_ends_all_ranks(checkpoint, plan);
  }
}

// Each call of a writer of 3 windows fails in turn. The kernel reports a failed write-back once, so
// that a later sync would succeed. Catches: an error of a write-back that is swallowed.
TEST(SaveFault, AFailedWritebackEndsTheSave) {
  size_t writebacks = 0;
  for (int64_t fail_at = 1;; ++fail_at) {
    MemoryFileSystem under;
    under.make_directory("/out");
    under.create("/out/a")->allocate(3 * DataWriter::kWindowBytes);
    RecordingFileSystem files(under, fail_at);
    const std::string out = "/out";
    const std::vector<std::byte> bytes(DataWriter::kWindowBytes);
    bool is_failed = false;
    try {
      DataWriter writer(files, out);
      for (uint64_t window = 0; window < 3; ++window) {
        writer.write("a", window * bytes.size(), bytes);
      }
      writer.finish();
    } catch (const Error& error) {
      is_failed = error.category() == Category::io;
    }
    const std::vector<IoCall> calls = files.calls();
    if (calls.size() < static_cast<size_t>(fail_at)) break;
    EXPECT_TRUE(is_failed) << calls.back().what;
    if (calls.back().what.ends_with("_writeback")) ++writebacks;
  }
  EXPECT_EQ(writebacks, 5U);  // 3 begin, and 2 are waited for
}

// The highest end of the ranges recorded as `what`.
uint64_t end_of(const std::vector<IoCall>& ranges, const std::string& what) {
  uint64_t end = 0;
  for (const IoCall& range : ranges) {
    if (range.what == what) end = std::max(end, range.end);
  }
  return end;
}

// Windows are written back behind the writer, and at most two are dirty or cached. Catches: a
// writer that does not wait for an earlier window, or does not drop it.
TEST(Save, DirtyPagesAreBounded) {
  MemoryFileSystem under;
  under.make_directory("/out");
  RecordingFileSystem files(under);
  under.create("/out/a")->allocate(64 * kMiB);
  const std::string out = "/out";
  DataWriter writer(files, out);
  const std::vector<std::byte> bytes(kMiB);
  for (uint64_t at = 0; at < 64 * kMiB; at += kMiB) {
    writer.write("a", at, bytes);
    EXPECT_LE(at + kMiB - end_of(files.writebacks(), "finish"), 2 * DataWriter::kWindowBytes);
    EXPECT_LE(at + kMiB - end_of(files.drops(), "drop"), 2 * DataWriter::kWindowBytes);
  }
  writer.finish();
  EXPECT_EQ(files.calls().back().what, "close");
}

// Every second 16 KiB of a file belong to another rank, which writes at nearly the same offset.
// Pages are written back once that rank has also passed them, and dropped later; dirty pages stay
// bounded. Catches: pages that are written back, or dropped, while the other rank writes to them.
TEST(Save, SharedPagesAreWrittenBackLater) {
  MemoryFileSystem under;
  under.make_directory("/out");
  RecordingFileSystem files(under);
  under.create("/out/a")->allocate(64 * kMiB);
  const std::string out = "/out";
  DataWriter writer(files, out);
  const std::vector<std::byte> bytes(16 * kKiB);
  const uint64_t window = DataWriter::kWindowBytes;  // file range; this rank writes half of it
  for (uint64_t at = 0; at < 64 * kMiB; at += 32 * kKiB) {
    writer.write("a", at, bytes);
    const uint64_t end = at + bytes.size();
    EXPECT_LE(end_of(files.writebacks(), "start") + window, std::max(end, window));
    EXPECT_LE(end_of(files.drops(), "drop") + 4 * window, std::max(end, 4 * window));
    EXPECT_LE((end - end_of(files.writebacks(), "finish")) / 2, 2 * window);
  }
  EXPECT_GT(end_of(files.drops(), "drop"), 0U);
  writer.finish();
  EXPECT_GE(end_of(files.drops(), "drop") + 16 * kKiB, 64 * kMiB);
}

// Catches: sums that remain the same if an element is written twice or not at all.
TEST(ChunkSums, AnElementWrittenTwiceOrNeverIsDetected) {
  const Manifest manifest = output_manifest({{spec("w", DType::bf16, {3'000'000})}});
  const std::vector<std::byte> values(6'000'000, std::byte{7});
  const std::span<const std::byte> all(values);
  const auto prove = [&](std::vector<std::pair<uint64_t, uint64_t>> parts) {
    ChunkSums merged(manifest, kPoint);
    for (const auto& [begin, end] : parts) {
      ChunkSums of_rank(manifest, kPoint);
      of_rank.add(0, begin, all.subspan(begin, end - begin));
      merged.merge(of_rank.bytes());
    }
    merged.prove();
    return digest_of_tensor(merged, 0);
  };
  const uint64_t digest = prove({{0, 6'000'000}});
  EXPECT_EQ(prove({{5'000'000, 6'000'000}, {0, 5'000'000}}), digest);
  for (const auto& wrong : std::vector<std::vector<std::pair<uint64_t, uint64_t>>>{
           {{0, 5'999'998}},
           {{0, 4'000'000}, {3'999'998, 6'000'000}},
           {{0, 2}, {0, 2}, {4, 6'000'000}}}) {
    EXPECT_THROW(prove(wrong), Error);
  }
}

TEST(ChunkSums, TheFailureNamesTheFileTheTensorAndTheCounts) {
  const Manifest manifest = output_manifest({{spec("w", DType::bf16, {10})}});
  const std::vector<std::byte> values(20);
  const auto failure_of = [&](uint64_t first_bytes, uint64_t more_bytes) -> Facts {
    ChunkSums sums(manifest, kPoint);
    sums.add(0, 0, std::span(values).first(first_bytes));
    sums.add(0, 0, std::span(values).first(more_bytes));
    try {
      sums.prove();
    } catch (const Error& error) {
      return error.facts();
    }
    return {};
  };
  const Facts missing = failure_of(18, 0);
  EXPECT_EQ(missing.file, "model.safetensors");
  EXPECT_EQ(missing.tensor, "w");
  EXPECT_EQ(missing.expected, "10 elements from element 0 on");
  EXPECT_EQ(missing.got, "9 elements");
  EXPECT_EQ(failure_of(18, 2).got, "10 elements, some of them more than once");
}

}  // namespace
}  // namespace modicum

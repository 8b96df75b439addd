#include "modicum/stream/save.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "modicum/kernels/kernels.h"
#include "modicum/stream/data_writer.h"
#include "modicum/stream/gathered_writer.h"
#include "modicum/stream/rank_workers.h"
#include "modicum/stream/reader.h"
#include "modicum/stream/stream.h"

namespace modicum {
namespace {

Manifest manifest_of(const SavedForm& form, const Checkpoint& source, const SaveForm& as) {
  std::vector<TensorSpec> specs;
  std::vector<uint32_t> file_of;
  for (const SavedTensor& tensor : form.tensors) {
    specs.push_back(tensor.spec);
    // Tensors that the source does not store go into its last file.
    file_of.push_back(tensor.stored ? source.manifest.tensors[*tensor.stored].at.file
                                    : static_cast<uint32_t>(source.manifest.files.size()) - 1);
  }
  return output_manifest(as.shard_bytes ? split_into_files(std::move(specs), *as.shard_bytes)
                                        : group_by_file(std::move(specs), file_of),
                         as.stem.value_or(stem_of(source.manifest)));
}

// The save's plan allocates no buffer: each is in host memory or read with Sink::fetch.
PlanOptions options_of(const Plan& loaded, const SaveForm& form) {
  const auto at_hand = [](Destination to) {
    return to == Destination::copy ? Destination::copy : Destination::caller_memory;
  };
  PlanOptions options = loaded.options;
  options.strategy = &strategy_named("own-shard");
  options.destination = at_hand(options.destination);
  for (Destination& to : options.destination_of) to = at_hand(to);
  options.gathers = form.gathers;
  options.from_first = form.from_first;
  options.fork = Fork::excluded;
  options.init_bytes = 0;
  options.after = {};
  options.save = options.resume = std::nullopt;
  return options;
}

std::vector<SavePlan::CopiedTensor> copied_of(const SavedForm& form, const Manifest& saved) {
  std::vector<std::pair<std::string_view, uint32_t>> by_name;
  for (uint32_t s = 0; s < saved.tensors.size(); ++s) {
    by_name.emplace_back(saved.tensors[s].spec.fqn, s);
  }
  std::sort(by_name.begin(), by_name.end());
  std::vector<SavePlan::CopiedTensor> copied;
  for (const SavedTensor& tensor : form.tensors) {
    if (!tensor.is_copied) continue;
    const auto at = std::lower_bound(by_name.begin(), by_name.end(),
                                     std::pair(std::string_view(tensor.spec.fqn), 0U));
    copied.push_back({*tensor.stored, at->second});
  }
  return copied;
}

// Whether a run's elements are contiguous in the buffer.
bool is_contiguous(const Transfer& t) noexcept { return t.runs.at_step == 1 || t.runs.length == 1; }

// The elements of a transfer's first run in host memory.
Snapshot::Pieces pieces_of(const Transfer& t, std::span<const std::byte> host) {
  const uint64_t size = bytes_of(t.to_dtype, 1);
  return {host.data() + bytes_of(t.to_dtype, t.runs.at), size,
          t.runs.at_step * static_cast<int64_t>(size), t.runs.length};
}

class Save {
 public:
  Save(const SaveRun& run, const SaveFiles& to, ChunkSums& sums)
      : run_(run),
        at_(run.at),
        plan_(run.plan.plan()),
        manifest_(run.plan.manifest()),
        to_(to),
        sums_(sums),
        header_(at_.ledger->adopt(Purpose::header, run.plan.footprint()[Purpose::header])),
        plan_charge_(at_.ledger->adopt(Purpose::plan, run.plan.footprint()[Purpose::plan])) {
    const int threads = std::max(1, run.threads);
    staging_ = at_.ledger->charge(Purpose::staging,
                                  plan_.staging.total_bytes - plan_.staging.gather_part_bytes,
                                  threads, [this] { at_.board->check(); });
    workers_ = std::min(threads, plan_.staging.workers);
  }

  SaveOutcome run() {
    if (run_.snapshot == nullptr) {
      run_rank_workers(*at_.board, at_.rank, 1, [this](int) {
        outcome_.written_bytes =
            create_files(manifest_, to_, *at_.board, {at_.rank, plan_.ranks()});
      });
      at_.board->barrier(at_.rank);
    }
    run_rank_workers(*at_.board, at_.rank, workers_, [this](int index) {
      Worker worker(*this, index);
      write_own(worker, Rows::whole);
      copy_unread(worker);
      finish(worker);
    });
    // Ranks that write parts of the same rows begin at the same time: see DataWriter.
    if (run_.snapshot == nullptr) at_.board->barrier(at_.rank);
    if (at_.gather != nullptr) workers_ = 1;
    run_rank_workers(*at_.board, at_.rank, workers_, [this](int index) {
      Worker worker(*this, index);
      if (at_.gather != nullptr) {
        write_together(worker);
      } else {
        write_own(worker, Rows::divided);
      }
      finish(worker);
    });
    return outcome_;
  }

 private:
  // One thread. All threads generate the same writes; each carries out every workers_-th one.
  struct Worker {
    Worker(Save& save, int index_of)
        : index(index_of),
          share(save.share_of(index)),
          tile(share.subspan(save.plan_.staging.table_bytes, save.plan_.staging.tile_bytes)),
          room(share.subspan(save.plan_.staging.table_bytes + tile.size())),
          writer(save.to_.files, save.to_.directory),
          source(save.run_.source) {}

    // The scratch space of for_each_write.
    std::span<Transfer> table() const {
      auto* const rows = reinterpret_cast<Transfer*>(share.data());
      std::uninitialized_default_construct_n(rows, kReadTableRows);
      return {rows, kReadTableRows};
    }

    const int index;
    int64_t next = 0;  // number of the next write
    // This worker's staging, and its parts for bytes to write (`tile`) and for elements to cast.
    const std::span<std::byte> share, tile, room;
    DataWriter writer;
    DataReader source;
  };

  std::span<std::byte> share_of(int worker) const noexcept {
    const uint64_t share = plan_.staging.table_bytes + plan_.staging.slot_bytes;
    return staging_.bytes().subspan(worker * share, share);
  }
  bool is_turn_of(Worker& worker) const noexcept {
    return worker.next++ % workers_ == worker.index;
  }

  void write_own(Worker& worker, Rows rows) {
    for_each_write(plan_, at_.rank, rows, worker.table(), [&](const Write& write) {
      if (!is_turn_of(worker)) return;
      put(worker, write.at, write.direct ? bytes_at(write.transfers[0]) : staged(worker, write));
    });
  }

  void write_together(Worker& worker) {
    GatheredWriter gathered(manifest_, at_, to_, sums_);
    for_each_write(plan_, at_.rank, Rows::divided, worker.table(), [&](const Write& write) {
      const auto bytes = write.direct ? bytes_at(write.transfers[0]) : staged(worker, write);
      if (bytes.size() < DataWriter::kSmallBytes) {
        gathered.put(write.at, bytes);
      } else {
        put(worker, write.at, bytes);
      }
    });
    gathered.finish(outcome_);
  }

  void put(Worker& worker, const Extent& at, std::span<const std::byte> bytes) {
    at_.board->check();
    worker.writer.write(manifest_.files[at.file].name, at.begin, bytes);
    at_.board->beat(at_.rank, bytes.size());
    sums_.add(at, bytes);
  }

  // The elements of a run that is contiguous in host memory, in the buffer's dtype.
  std::span<const std::byte> bytes_at(const Transfer& t) const noexcept {
    return run_.from.host(t.buffer).subspan(bytes_of(t.to_dtype, t.runs.at),
                                            bytes_of(t.to_dtype, t.runs.length));
  }

  // The bytes of a write, collected in the worker's tile.
  std::span<const std::byte> staged(Worker& worker, const Write& write) const {
    std::byte* to = worker.tile.data();
    for (const Transfer& t : write.transfers) {
      take(worker, t, to);
      to += bytes_of(t.from_dtype, t.runs.length);
    }
    return worker.tile.first(write.at.bytes());
  }

  // Casts one run of a buffer to the saved dtype. The plan loads the saved files, so a save goes
  // from a transfer's to_dtype to its from_dtype.
  void take(Worker& worker, const Transfer& t, std::byte* to) const {
    const std::span<const std::byte> host = run_.from.host(t.buffer);
    const bool contiguous = is_contiguous(t);
    if (contiguous && !host.empty() && run_.snapshot == nullptr) {
      return cast(bytes_at(t).data(), t.to_dtype, to, t.from_dtype, t.runs.length);
    }
    if (contiguous && !t.casts()) return fetch(t, 0, {to, bytes_of(t.to_dtype, t.runs.length)});
    // All other runs are copied to `room` before the cast: contiguous runs from a device or a
    // snapshot, and runs that are not contiguous, which are collected there. `most` is a multiple
    // of 8, so that a part of elements smaller than a byte ends at the end of a byte.
    std::array<std::byte, 4096> gathered;
    const std::span<std::byte> room = contiguous ? worker.room : std::span(gathered);
    const auto most = static_cast<int64_t>(room.size() * 8) / bits_per_element(t.to_dtype) / 8 * 8;
    for (int64_t i = 0; i < t.runs.length; i += most) {
      const int64_t n = std::min(most, t.runs.length - i);
      const std::span<std::byte> elements = room.first(bytes_of(t.to_dtype, n));
      if (contiguous) {
        fetch(t, i, elements);
      } else {
        gather(t.part(0, 1, i, n), host, elements);
      }
      cast(elements.data(), t.to_dtype, to + bytes_of(t.from_dtype, i), t.from_dtype, n);
    }
  }

  // Copies elements of a run that is contiguous in the buffer, from the i-th on.
  void fetch(const Transfer& t, int64_t i, std::span<std::byte> elements) const {
    const std::span<const std::byte> host = run_.from.host(t.buffer);
    if (run_.snapshot == nullptr || host.empty()) {
      return run_.from.fetch(t.buffer, t.runs.at + i, elements);
    }
    const std::byte* const first = host.data() + bytes_of(t.to_dtype, t.runs.at + i);
    run_.snapshot->read({first, elements.size()}, elements.data());
  }

  // Copies the elements of a run that is not contiguous in the buffer.
  void gather(const Transfer& t, std::span<const std::byte> host,
              std::span<std::byte> elements) const {
    if (run_.snapshot != nullptr && !host.empty()) {
      return run_.snapshot->read(pieces_of(t, host), elements.data());
    }
    const size_t size = bytes_of(t.to_dtype, 1);
    for (int64_t i = 0; i < t.runs.length; ++i) {
      const int64_t at = t.runs.at + i * t.runs.at_step;
      const std::span<std::byte> to = elements.subspan(static_cast<size_t>(i) * size, size);
      if (host.empty()) {
        run_.from.fetch(t.buffer, at, to);
      } else {
        const std::span<const std::byte> element =
            host.subspan(static_cast<size_t>(at) * size, size);
        std::copy(element.begin(), element.end(), to.begin());
      }
    }
  }

  // Copies the tensors that no target reads. Each rank copies every ranks-th of them.
  void copy_unread(Worker& worker) {
    const auto ranks = static_cast<size_t>(plan_.ranks());
    for (size_t i = static_cast<size_t>(at_.rank); i < run_.plan.copied().size(); i += ranks) {
      if (!is_turn_of(worker)) continue;
      const auto [from, to] = run_.plan.copied()[i];
      const Extent& source = run_.source.manifest.tensors[from].at;
      const Extent& saved = manifest_.tensors[to].at;
      for (uint64_t done = 0; done < source.bytes(); done += worker.tile.size()) {
        const uint64_t n = std::min<uint64_t>(worker.tile.size(), source.bytes() - done);
        worker.source.read(source.file, source.begin + done, worker.tile.first(n));
        if (run_.compared != nullptr) run_.compared->add(from, done, worker.tile.first(n));
        put(worker, {saved.file, saved.begin + done, saved.begin + done + n}, worker.tile.first(n));
      }
    }
  }

  void finish(Worker& worker) {
    worker.source.finish();
    worker.writer.finish();
    const std::lock_guard lock(mutex_);
    outcome_.written_bytes += worker.writer.bytes_written();
    outcome_.read_bytes += worker.source.bytes_read();
  }

  const SaveRun& run_;
  const RankContext& at_;
  const Plan& plan_;
  const Manifest& manifest_;
  const SaveFiles& to_;
  ChunkSums& sums_;
  Charge header_, plan_charge_;
  Buffer staging_;
  int workers_ = 1;
  std::mutex mutex_;
  SaveOutcome outcome_;
};

}  // namespace

SavePlan::SavePlan(const Checkpoint& source, const Plan& loaded, const SaveForm& form)
    : form_(saved_form(*loaded.recipe, source.manifest,
                       {.copies_unused = form.copies_unused,
                        .dtype = form.dtype,
                        .is_computed = form.is_computed})),
      manifest_(manifest_of(form_, source, form)),
      recipe_(saved_recipe(*loaded.recipe, source.manifest, form_, manifest_)),
      plan_(make_plan(manifest_, recipe_, loaded.layout, options_of(loaded, form))),
      copied_(copied_of(form_, manifest_)) {}

std::optional<NewForm> SavePlan::new_form(const Checkpoint& source) const {
  FormTally tally;
  for (const SavedTensor& tensor : form_.tensors) {
    tally.add(tensor.spec, tensor.stored ? &source.manifest.tensors[*tensor.stored] : nullptr);
  }
  return tally.new_form();
}

Footprint SavePlan::footprint() const {
  Footprint result;
  result[Purpose::header] = manifest_.held_bytes() + text_bytes(manifest_);
  result[Purpose::plan] = plan_.held_bytes() + ChunkSums::held_bytes(manifest_);
  return result;
}

uint64_t text_bytes(const Manifest& manifest) noexcept {
  uint64_t most = ChunkSums::exchanged_bytes(manifest);
  for (const DataFile& file : manifest.files) {
    most = std::max(most, heap_block_bytes(file.header_bytes));
  }
  return most;
}

SaveNeeds SavePlan::needs() const {
  SaveNeeds needs{footprint(), plan_.staging.gather_part_bytes};
  needs.footprint[Purpose::staging] = plan_.staging.total_bytes - needs.gather_bytes;
  return needs;
}

Footprint save_footprint(std::span<const SaveNeeds> parts, uint64_t own_bytes,
                         uint64_t record_bytes) {
  Footprint result;
  uint64_t staging = 0, gather = 0;
  for (const SaveNeeds& part : parts) {
    result += part.footprint;
    staging = std::max(staging, part.footprint[Purpose::staging]);
    gather = std::max(gather, part.gather_bytes);
  }
  result[Purpose::staging] = staging + gather;
  result[Purpose::header] += 2 * own_bytes + record_bytes - std::min(record_bytes, staging);
  return result;
}

void expect_writes(Snapshot& snapshot, const SavePlan& plan, int rank, Sink& from) {
  std::vector<Transfer> table(kReadTableRows);
  const auto expect = [&](const Write& write) {
    for (const Transfer& t : write.transfers) {
      const std::span<const std::byte> host = from.host(t.buffer);
      if (host.empty()) continue;
      Snapshot::Pieces pieces = pieces_of(t, host);
      if (is_contiguous(t)) pieces = {pieces.first, bytes_of(t.to_dtype, t.runs.length)};
      snapshot.expect(pieces);
    }
  };
  for (const Rows rows : {Rows::whole, Rows::divided}) {
    for_each_write(plan.plan(), rank, rows, table, expect);
  }
}

SaveOutcome save(const SaveRun& run, const SaveFiles& to, ChunkSums& sums) {
  check_context(run.at, run.plan.plan(), run.from);
  return Save(run, to, sums).run();
}

}  // namespace modicum

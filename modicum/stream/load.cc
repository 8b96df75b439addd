#include <algorithm>
#include <functional>
#include <mutex>
#include <new>
#include <utility>

#include "modicum/stream/coverage.h"
#include "modicum/stream/reader.h"
#include "modicum/stream/stream.h"
#include "modicum/stream/writer.h"

namespace modicum {
namespace {

constexpr uint64_t kWindowChunkBytes = 8 * kMiB;

// What goes wrong while `tensor` is read says so.
template <typename Act>
void naming(const Stored& tensor, Act act) {
  try {
    act();
  } catch (const Error& error) {
    Facts facts = error.facts();
    if (facts.tensor.empty() && !facts.file.empty()) facts.tensor = tensor.spec.fqn;
    fail(error.category(), error.what_happened(), std::move(facts));
  }
}

class Load {
 public:
  Load(const Checkpoint& checkpoint, const Plan& plan, const RankContext& at, Sink& sink,
       Ledger& ledger, const LoadOptions& options)
      : checkpoint_(checkpoint),
        plan_(plan),
        at_(at),
        sink_(sink),
        options_(options),
        header_(ledger.adopt(Purpose::header, plan.manifest->held_bytes())),
        plan_charge_(ledger.adopt(Purpose::plan, plan.held_bytes())),
        coverage_(plan) {
    commit(ledger);
  }

  LoadOutcome run() {
    switch (plan_.strategy().of_reader) {
      case Window::none: stream_own_bytes(); break;
      case Window::whole_model:
        if (plan_.strategy().reader == Reader::every_rank) {
          fill_window();
          cut_from_window();
        } else {
          if (at_.rank == 0) fill_window();
          broadcast_tensors();
        }
        break;
      case Window::one_tensor: MODICUM_ASSERT(false);
    }
    coverage_.prove(at_.rank);
    return outcome_;
  }

 private:
  // Everything that the run will hold, before the first data byte.
  void commit(Ledger& ledger) {
    const auto& load = plan_.promise.phases[kLoadPhase].of_rank[static_cast<size_t>(at_.rank)];
    const int threads = std::max(1, options_.threads);
    window_ = ledger.charge(Purpose::window, load[Purpose::window], threads);
    const Staging& staging = plan_.staging;
    if (staging.ring_part_bytes > 0) {
      MODICUM_ASSERT(at_.exchange != nullptr);
      ring_ = at_.exchange->commit(ledger);
    }
    staging_ =
        ledger.charge(Purpose::staging, staging.total_bytes - staging.ring_part_bytes, threads);
    workers_ = staging.workers == 0 ? threads : std::min(threads, staging.workers);
    if (plan_.strategy().of_reader != Window::none) begins_ = window_begins(plan_);
  }

  std::span<std::byte> share_of(int worker) const noexcept {
    const uint64_t share = plan_.staging.table_bytes + plan_.staging.slot_bytes;
    return staging_.bytes().subspan(std::min(staging_.bytes().size(), worker * share),
                                    staging_.empty() ? 0 : share);
  }
  std::span<std::byte> slot_of(int worker) const noexcept {
    return share_of(worker).subspan(staging_.empty() ? 0 : plan_.staging.table_bytes);
  }
  Writer writer_of(int worker) noexcept {
    return Writer(plan_, sink_, coverage_, options_, slot_of(worker));
  }

  // The first failure goes to the board at once: it ends this rank's other workers, and the other
  // ranks, at their next look.
  void in_workers(const std::function<void(int worker)>& work) {
    run_workers(workers_, [&](int worker) {
      try {
        work(worker);
      } catch (const Error& error) {
        at_.board->report(record_of(error, at_.rank));
        throw;
      }
    });
  }

  // Each worker walks all reads and takes every n-th: no queue, and the same reads at any number.
  void stream_own_bytes() {
    in_workers([this](int worker) {
      auto* const rows = reinterpret_cast<Transfer*>(share_of(worker).data());
      std::uninitialized_default_construct_n(rows, kReadTableRows);
      DataReader reader(checkpoint_);
      DataReader scales(checkpoint_);  // stand elsewhere: a reader of their own loses no window
      Writer writer = writer_of(worker);
      const std::span<std::byte> slot = slot_of(worker);
      int64_t turn = 0;
      const auto mine = [&] { return turn++ % workers_ == worker; };
      for_each_read(
          plan_, at_.rank, {rows, kReadTableRows},
          [&](const Read& read) {
            if (!mine()) return;
            const ScalesAtHand at_hand = read_scales(read, scales, slot);
            carry_out(read, at_hand, reader, writer, slot);
          },
          [&](const Transfer& made) {
            if (mine()) writer.make(made);
          });
      count(reader, writer);
      const std::lock_guard lock(mutex_);
      add(scales);
    });
  }

  // Behind the codes that will be read.
  ScalesAtHand read_scales(const Read& read, DataReader& reader, std::span<std::byte> slot) {
    if (read.scale.bytes() == 0) return {};
    const uint32_t codes = read.transfers.front().from;
    const std::span<std::byte> into = slot.subspan(read.end - read.begin, read.scale.bytes());
    naming(plan_.manifest->tensors[plan_.manifest->tensors[codes].scale->tensor],
           [&] { reader.read(read.scale.file, read.scale.begin, into); });
    at_.board->beat(at_.rank, read.scale.bytes());
    return scales_read(plan_, codes, read.scale, into.data());
  }

  void carry_out(const Read& read, const ScalesAtHand& scales, DataReader& reader, Writer& writer,
                 std::span<std::byte> slot) {
    at_.board->check();
    const Transfer& first = read.transfers.front();
    const std::span<std::byte> into =
        read.direct ? writer.place_of(first) : slot.first(read.end - read.begin);
    naming(plan_.manifest->tensors[first.from], [&] { reader.read(read.file, read.begin, into); });
    if (read.direct) {
      writer.placed(first);
    } else {
      for (const Transfer& transfer : read.transfers) {
        const Stored& stored = plan_.manifest->tensors[transfer.from];
        const Extent run = extent_of(stored, transfer.runs.first, transfer.runs.run);
        writer.put(transfer, into.data() + (run.begin - read.begin), scales);
      }
    }
    at_.board->beat(at_.rank, read.end - read.begin);
  }

  // Every needed tensor whole, in file order, chunk by chunk.
  void fill_window() {
    in_workers([this](int worker) {
      DataReader reader(checkpoint_);
      int64_t turn = 0;
      for (uint32_t s = 0; s < plan_.manifest->tensors.size(); ++s) {
        if (!is_needed(plan_, s)) continue;
        const Extent& extent = plan_.manifest->tensors[s].at;
        for (uint64_t done = 0; done < extent.bytes(); done += kWindowChunkBytes) {
          if (turn++ % workers_ != worker) continue;
          at_.board->check();
          const uint64_t n = std::min(kWindowChunkBytes, extent.bytes() - done);
          naming(plan_.manifest->tensors[s], [&] {
            reader.read(extent.file, extent.begin + done,
                        window_.bytes().subspan(begins_[s] + done, n));
          });
          at_.board->beat(at_.rank, n);
        }
      }
      const std::lock_guard lock(mutex_);
      add(reader);
    });
  }

  const std::byte* element_of(const std::byte* tensor, const Transfer& transfer) const {
    const Stored& stored = plan_.manifest->tensors[transfer.from];
    return tensor +
           (extent_of(stored, transfer.runs.first, transfer.runs.run).begin - stored.at.begin);
  }

  ScalesAtHand scales_in_window(uint32_t codes) const {
    const auto scale = scale_beside(plan_, codes);
    return scale ? ScalesAtHand{window_.bytes().data() + begins_[*scale]} : ScalesAtHand{};
  }

  void cut_from_window() {
    in_workers([this](int worker) {
      Writer writer = writer_of(worker);
      int64_t turn = 0;
      for_each_transfer(plan_, at_.rank, [&](const Transfer& transfer) {
        if (turn++ % workers_ != worker) return;
        at_.board->check();
        if (transfer.source != Transfer::Source::stored) return writer.make(transfer);
        writer.put(transfer, element_of(window_.bytes().data() + begins_[transfer.from], transfer),
                   scales_in_window(transfer.from));
        at_.board->beat(at_.rank, 0);
      });
      const std::lock_guard lock(mutex_);
      outcome_.bytes_loaded += writer.bytes_loaded();
    });
  }

  // Where the tensor stands then: in rank 0's window as before, in the others' at `place`.
  const std::byte* broadcast_tensor(uint32_t stored, uint64_t place) {
    const uint64_t bytes = plan_.manifest->tensors[stored].at.bytes();
    const std::span<std::byte> tensor =
        window_.bytes().subspan(at_.rank == 0 ? begins_[stored] : place, bytes);
    if (plan_.ranks() > 1) at_.exchange->broadcast(0, tensor);
    if (at_.rank != 0) outcome_.exchanged_bytes += bytes;
    at_.board->beat(at_.rank, at_.rank == 0 ? 0 : bytes);
    return tensor.data();
  }

  // Rank 0 has the model in its window, the others one tensor at a time in theirs.
  void broadcast_tensors() {
    Writer writer = writer_of(0);
    for (uint32_t s = 0; s < plan_.manifest->tensors.size(); ++s) {
      if (!gives_elements(plan_, s)) continue;
      const std::byte* tensor = broadcast_tensor(s, 0);
      ScalesAtHand scales;
      if (const auto scale = scale_beside(plan_, s)) {
        scales.bytes = broadcast_tensor(*scale, scale_place(plan_.manifest->tensors[s]));
      }
      for_each_transfer_from(plan_, at_.rank, s, [&](const Transfer& transfer) {
        writer.put(transfer, element_of(tensor, transfer), scales);
      });
    }
    for_each_transfer(plan_, at_.rank, [&](const Transfer& transfer) {
      if (transfer.source != Transfer::Source::stored) writer.make(transfer);
    });
    outcome_.bytes_loaded += writer.bytes_loaded();
  }

  void count(const DataReader& reader, const Writer& writer) {
    const std::lock_guard lock(mutex_);
    add(reader);
    outcome_.bytes_loaded += writer.bytes_loaded();
  }
  void add(const DataReader& reader) {
    outcome_.storage_read_bytes += reader.bytes_read();
    outcome_.page_cache_peak_bytes += reader.page_cache_peak_bytes();
  }

  const Checkpoint& checkpoint_;
  const Plan& plan_;
  const RankContext& at_;
  Sink& sink_;
  const LoadOptions& options_;
  Charge header_, plan_charge_, ring_;
  Buffer window_, staging_;
  int workers_ = 1;
  std::vector<uint64_t> begins_;
  Coverage coverage_;
  std::mutex mutex_;
  LoadOutcome outcome_;
};

}  // namespace

LoadOutcome load(const Checkpoint& checkpoint, const Plan& plan, const RankContext& at, Sink& sink,
                 Ledger& ledger, const LoadOptions& options) {
  MODICUM_ASSERT(at.board != nullptr);
  at.board->agree(at.rank, plan.inputs);
  return Load(checkpoint, plan, at, sink, ledger, options).run();
}

}  // namespace modicum

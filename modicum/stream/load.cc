#include <algorithm>
#include <exception>
#include <mutex>
#include <new>
#include <utility>

#include "modicum/stream/coverage.h"
#include "modicum/stream/reader.h"
#include "modicum/stream/stream.h"
#include "modicum/stream/writer.h"

namespace modicum {
namespace {

class Load {
 public:
  Load(const Checkpoint& checkpoint, const Plan& plan, const RankContext& at, Sink& sink,
       const LoadOptions& options)
      : checkpoint_(checkpoint),
        plan_(plan),
        at_(at),
        sink_(sink),
        options_(options),
        header_(at.ledger->adopt(Purpose::header, plan.manifest->held_bytes())),
        plan_charge_(at.ledger->adopt(Purpose::plan, plan.held_bytes())),
        window_(plan, at.rank),
        coverage_(plan, at.rank),
        ties_(plan) {
    commit(*at.ledger);
  }

  LoadOutcome run() {
    const bool sends = plan_.staging.exchanges;
    if (plan_.strategy().of_reader != Window::none) {
      fill_window();
      sends ? broadcast_tensors() : cut_from_window();
    } else if (plan_.strategy().reader == Reader::node_leader) {
      stream_on_node();
    } else {
      sends ? stream_in_turn() : stream_own_bytes();
    }
    coverage_.prove();
    ties_.prove(at_.rank);
    return outcome_;
  }

 private:
  // Everything that the load will hold, before the first data byte.
  void commit(Ledger& ledger) {
    const auto& load = plan_.promise.phases[kLoadPhase].of_rank[static_cast<size_t>(at_.rank)];
    const int threads = std::max(1, options_.threads);
    const auto look = [this] { at_.board->check(); };
    window_memory_ = ledger.charge(Purpose::window, load[Purpose::window], threads, look);
    const Staging& staging = plan_.staging;
    if (staging.ring_part_bytes > 0) {
      MODICUM_ASSERT(at_.exchange != nullptr);
      ring_ = at_.exchange->commit(ledger);
    }
    staging_ = ledger.charge(Purpose::staging, staging.total_bytes - staging.ring_part_bytes,
                             threads, look);
    workers_ = staging.workers == 0 ? threads : std::min(threads, staging.workers);
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
    return Writer(plan_, sink_, {coverage_, ties_}, options_, slot_of(worker));
  }

  // Workers share a walk without a queue: each makes all of it, and acts when it is its turn.
  struct Turn {
    int worker = 0;
    int workers = 1;
    int64_t next = 0;

    bool is_mine() noexcept { return next++ % workers == worker; }
  };

  // The first failure goes to the board at once: it ends this rank's other workers, and the other
  // ranks, at their next look.
  // A failure is kept before it is reported: those that the report makes fail come after it.
  void in_workers(FunctionRef<void(Turn turn)> work) {
    std::exception_ptr first;
    const auto fail_with = [&](const Error& error) {
      {
        const std::lock_guard lock(mutex_);
        if (!first) first = std::current_exception();
      }
      at_.board->report(record_of(error, at_.rank));
    };
    run_workers(workers_, [&](int worker) {
      try {
        work({worker, workers_});
      } catch (const Error& error) {
        fail_with(error);
      } catch (const std::exception& error) {  // of the caller's functions
        fail_with(Error(Category::internal, error.what()));
      }
    });
    if (first) std::rethrow_exception(first);
  }

  void stream_own_bytes() {
    in_workers([this](Turn turn) {
      Readers readers(checkpoint_);
      Writer writer = writer_of(turn.worker);
      const std::span<std::byte> slot = slot_of(turn.worker);
      for_each_read(plan_, at_.rank, table_of(turn.worker), [&](const Read& read) {
        if (!turn.is_mine()) return;
        const Transfer& first = read.transfers.front();
        if (read.direct) {
          fetch_into(writer.place_of(first), first.from, read.at, readers.codes);
          writer.placed(first);
        } else {
          fetch(first.from, read.at, read.scale, readers, slot);
          put(read, writer, slot);
        }
      });
      make(writer, turn);
      finish(readers, writer);
    });
  }

  // What needs no reading. What the caller makes, it makes on its own thread, which is the last
  // worker's.
  void make(Writer& writer, Turn turn) {
    for_each_made_transfer(plan_, at_.rank, [&](const Transfer& made) {
      const bool is_callers = made.source == Transfer::Source::caller;
      if (is_callers ? turn.worker != turn.workers - 1 : !turn.is_mine()) return;
      at_.board->check();
      writer.make(made);
    });
  }

  // Ranks that hold the same have the same reads; each makes those whose turn it is.
  void stream_in_turn() {
    const std::vector<int> group = exchange_group(plan_, at_.rank);
    Readers readers(checkpoint_);
    Writer writer = writer_of(0);
    const std::span<std::byte> slot = slot_of(0);
    size_t turn = 0;
    for_each_read(plan_, at_.rank, table_of(0), [&](const Read& read) {
      const size_t root = turn++ % group.size();
      const bool reads = group[root] == at_.rank;
      if (reads) fetch(read.transfers.front().from, read.at, read.scale, readers, slot);
      at_.exchange->broadcast(static_cast<int>(root), slot.first(read.bytes()));
      if (!reads) received(read.bytes());
      put(read, writer, slot);
    });
    make(writer, {});
    finish(readers, writer);
  }

  // The leader reads what any rank of its node needs, and each takes its own of that.
  void stream_on_node() {
    const std::vector<int> group = exchange_group(plan_, at_.rank);
    const auto place = static_cast<size_t>(at_.rank - group.front());
    Readers readers(checkpoint_);
    Writer writer = writer_of(0);
    const std::span<std::byte> slot = slot_of(0);
    for_each_node_read(plan_, at_.rank, [&](const NodeRead& read) {
      at_.board->check();
      const NodeRead::Wanted& wanted = read.wanted[place];
      const bool reads = reads_storage(plan_, at_.rank);
      if (reads) fetch(read.stored, read.at, read.scale, readers, slot);
      if (group.size() > 1) {
        at_.exchange->broadcast(0, slot.first(read.bytes()), {wanted.begin, wanted.end});
      }
      const ScalesAtHand scales =
          scales_read(plan_, read.stored, read.scale, slot.data() + read.at.bytes());
      const auto put = [&](const Transfer& part) {
        writer.put(part, place_in(slot, read.at.begin, part), scales);
      };
      if (wanted.bytes() > 0) {
        for_each_transfer_of(plan_, at_.rank, read.target, [&](const Transfer& transfer) {
          for_each_transfer_within(transfer, read, put);
        });
      }
      if (!reads) received(wanted.bytes());
    });
    make(writer, {});
    finish(readers, writer);
  }

  std::span<Transfer> table_of(int worker) const {
    auto* const rows = reinterpret_cast<Transfer*>(share_of(worker).data());
    std::uninitialized_default_construct_n(rows, kReadTableRows);
    return {rows, kReadTableRows};
  }

  // Scales stand elsewhere than their codes: with a reader of their own no window is lost.
  struct Readers {
    explicit Readers(const Checkpoint& checkpoint) : codes(checkpoint), scales(checkpoint) {}
    DataReader codes, scales;
  };

  // One read of a part of `stored`.
  void fetch_into(std::span<std::byte> into, uint32_t stored, const Extent& at,
                  DataReader& reader) {
    at_.board->check();
    naming_tensor(plan_.manifest->tensors[stored].spec.fqn,
                  [&] { reader.read(at.file, at.begin, into); });
    at_.board->beat(at_.rank, at.bytes());
  }

  // Stored bytes to the front of a slot, scales that they need behind them.
  void fetch(uint32_t stored, const Extent& at, const Extent& scale, Readers& readers,
             std::span<std::byte> slot) {
    fetch_into(slot.first(at.bytes()), stored, at, readers.codes);
    if (scale.bytes() == 0) return;
    fetch_into(slot.subspan(at.bytes(), scale.bytes()),
               plan_.manifest->tensors[stored].scale->tensor, scale, readers.scales);
  }

  // Where a transfer's first element stands in a slot that begins with byte `begin` of its file.
  const std::byte* place_in(std::span<std::byte> slot, uint64_t begin,
                            const Transfer& transfer) const {
    const Stored& stored = plan_.manifest->tensors[transfer.from];
    return slot.data() +
           (extent_of(stored, transfer.runs.first, transfer.runs.length).begin - begin);
  }

  void received(uint64_t bytes) {
    outcome_.exchanged_bytes += bytes;
    at_.board->beat(at_.rank, bytes);
  }

  // What a read has brought into a slot, to where it belongs.
  void put(const Read& read, Writer& writer, std::span<std::byte> slot) {
    const ScalesAtHand scales =
        scales_read(plan_, read.transfers.front().from, read.scale, slot.data() + read.at.bytes());
    for (const Transfer& transfer : read.transfers) {
      writer.put(transfer, place_in(slot, read.at.begin, transfer), scales);
    }
  }

  // Nothing where another rank reads.
  void fill_window() {
    in_workers([this](Turn turn) {
      DataReader reader(checkpoint_);
      window_.for_each_read([&](const RankWindow::Read& read) {
        if (!turn.is_mine()) return;
        fetch_into(window_memory_.bytes().subspan(read.place, read.at.bytes()), read.stored,
                   read.at, reader);
      });
      reader.finish();
      const std::lock_guard lock(mutex_);
      add(reader);
    });
  }

  std::span<std::byte> bytes_of_whole(const RankWindow::Whole& of) const noexcept {
    return window_memory_.bytes().subspan(of.place, plan_.manifest->tensors[of.stored].at.bytes());
  }

  void put_from_window(const RankWindow::Tensor& tensor, const Transfer& transfer, Writer& writer) {
    ScalesAtHand scales;
    if (tensor.scale) scales.bytes = bytes_of_whole(*tensor.scale).data();
    const std::span<std::byte> elements = bytes_of_whole(tensor.elements);
    const uint64_t begin = plan_.manifest->tensors[transfer.from].at.begin;
    writer.put(transfer, place_in(elements, begin, transfer), scales);
  }

  void cut_from_window() {
    in_workers([this](Turn turn) {
      Writer writer = writer_of(turn.worker);
      for_each_stored_transfer(plan_, at_.rank, [&](const Transfer& transfer) {
        if (!turn.is_mine()) return;
        at_.board->check();
        put_from_window(window_.tensor(transfer.from), transfer, writer);
        at_.board->beat(at_.rank, 0);
      });
      make(writer, turn);
      const std::lock_guard lock(mutex_);
      outcome_.bytes_loaded += writer.bytes_loaded();
    });
  }

  void broadcast(const RankWindow::Whole& of) {
    const std::span<std::byte> tensor = bytes_of_whole(of);
    at_.exchange->broadcast(0, tensor);
    received(reads_storage(plan_, at_.rank) ? 0 : tensor.size());
  }

  // One rank has the model in its window, the others one tensor at a time in theirs.
  void broadcast_tensors() {
    Writer writer = writer_of(0);
    window_.for_each_tensor([&](const RankWindow::Tensor& tensor) {
      broadcast(tensor.elements);
      if (tensor.scale) broadcast(*tensor.scale);
      for_each_transfer_from(
          plan_, at_.rank, tensor.elements.stored,
          [&](const Transfer& transfer) { put_from_window(tensor, transfer, writer); });
    });
    make(writer, {});
    outcome_.bytes_loaded += writer.bytes_loaded();
  }

  // At the end of a worker's reads.
  void finish(Readers& readers, const Writer& writer) {
    readers.codes.finish();
    readers.scales.finish();
    const std::lock_guard lock(mutex_);
    add(readers.codes);
    add(readers.scales);
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
  Buffer window_memory_, staging_;
  int workers_ = 1;
  RankWindow window_;
  Coverage coverage_;
  Ties ties_;
  std::mutex mutex_;
  LoadOutcome outcome_;
};

}  // namespace

LoadOutcome load(const Checkpoint& checkpoint, const Plan& plan, const RankContext& at, Sink& sink,
                 const LoadOptions& options) {
  MODICUM_ASSERT(at.board != nullptr);
  MODICUM_ASSERT(at.ledger != nullptr);
  return Load(checkpoint, plan, at, sink, options).run();
}

}  // namespace modicum

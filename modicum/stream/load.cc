#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "modicum/stream/coverage.h"
#include "modicum/stream/rank_workers.h"
#include "modicum/stream/reader.h"
#include "modicum/stream/stream.h"
#include "modicum/stream/writer.h"

namespace modicum {
namespace {

// The load of one rank. Its workers run one pass after the other: first they fill the window of
// whole tensors, if the strategy has one, then they put all elements into the sink.
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
    // Ranks that exchange must make the same calls in the same order, so they use one worker.
    const bool sends = plan_.staging.exchanges;
    if (plan_.strategy().of_reader != Window::none) {
      in_workers(workers_, &Load::fill_window);
      sends ? in_workers(1, &Load::broadcast_tensors)
            : in_workers(workers_, &Load::cut_from_window);
    } else if (plan_.strategy().reader == Reader::node_leader) {
      in_workers(1, &Load::stream_on_node);
    } else {
      sends ? in_workers(1, &Load::stream_in_turn) : in_workers(workers_, &Load::stream_own_bytes);
    }
    coverage_.prove();
    ties_.prove(at_.rank);
    return outcome_;
  }

 private:
  // Charges and commits all memory of the load before the first data byte is read.
  void commit(Ledger& ledger) {
    const auto& load = plan_.promise.phases[kLoadPhase].of_rank[static_cast<size_t>(at_.rank)];
    const int threads = std::max(1, options_.threads);
    const auto poll = [this] { at_.board->check(); };
    window_memory_ = ledger.charge(Purpose::window, load[Purpose::window], threads, poll);
    const Staging& staging = plan_.staging;
    if (staging.ring_part_bytes > 0) {
      if (at_.exchange == nullptr) {
        fail(Category::usage, "RankContext::exchange is null, and the plan's ranks exchange bytes");
      }
      ring_ = at_.exchange->commit(ledger);
    }
    staging_ = ledger.charge(Purpose::staging, staging.total_bytes - staging.ring_part_bytes,
                             threads, poll);
    workers_ = staging.workers_of(threads);
  }

  // A worker's table and slot (see Staging); empty if the load has no staging.
  std::span<std::byte> share_of(int worker) const noexcept {
    const uint64_t share = plan_.staging.table_bytes + plan_.staging.slot_bytes;
    return staging_.bytes().subspan(std::min(staging_.bytes().size(), worker * share),
                                    staging_.empty() ? 0 : share);
  }

  // How worker `worker` reads. The staging after the shares of all workers is divided among them:
  // reads around the page cache go through it.
  DataReader::Options reading(int worker) const noexcept {
    constexpr uint64_t kMost = 2 * kMiB, kLeast = 512 * kKiB;
    const auto workers = static_cast<uint64_t>(workers_);
    const auto rest =
        staging_.bytes().subspan(std::min(staging_.bytes().size(), workers * share_of(0).size()));
    const uint64_t bytes = std::min(kMost, rest.size() / workers / kPageBytes * kPageBytes);
    DataReader::Options options;
    if (reads_alone(plan_, at_.rank)) options.windows_behind = DataReader::kWindowsBehindAlone;
    if (bytes >= kLeast) options.room = rest.subspan(static_cast<uint64_t>(worker) * bytes, bytes);
    return options;
  }

  // One thread of the load. Workers share the reads without a queue: each worker generates all
  // reads and carries out every count-th one.
  struct Worker {
    Worker(Load& load, int index_of, int workers)
        : index(index_of),
          count(workers),
          share(load.share_of(index)),
          slot(share.subspan(share.empty() ? 0 : load.plan_.staging.table_bytes)),
          codes(load.checkpoint_, load.reading(index_of)),
          scales(load.checkpoint_),
          writer(load.plan_, load.sink_, {load.coverage_, load.ties_, load.options_.compared},
                 load.options_, slot) {}

    bool is_my_turn() noexcept { return next++ % count == index; }
    bool is_last() const noexcept { return index == count - 1; }
    // The scratch space of for_each_read.
    std::span<Transfer> table() const {
      auto* const rows = reinterpret_cast<Transfer*>(share.data());
      std::uninitialized_default_construct_n(rows, kReadTableRows);
      return {rows, kReadTableRows};
    }

    const int index, count;
    int64_t next = 0;
    const std::span<std::byte> share, slot;
    // Two readers, since scales are far from their codes in the files: a reader of both would drop
    // windows of codes from the page cache too early.
    DataReader codes, scales;
    Writer writer;
  };

  void in_workers(int count, void (Load::*work)(Worker&)) {
    run_rank_workers(*at_.board, at_.rank, count, [&](int index) {
      Worker worker(*this, index, count);
      (this->*work)(worker);
      finish(worker);
    });
  }

  void finish(Worker& worker) {
    worker.codes.finish();
    worker.scales.finish();
    const std::lock_guard lock(mutex_);
    for (const DataReader* reader : {&worker.codes, &worker.scales}) {
      outcome_.storage_read_bytes += reader->bytes_read();
      outcome_.page_cache_peak_bytes += reader->page_cache_peak_bytes();
    }
    outcome_.bytes_loaded += worker.writer.bytes_loaded();
  }

  void stream_own_bytes(Worker& worker) {
    for_each_read(plan_, at_.rank, worker.table(), [&](const Read& read) {
      if (!worker.is_my_turn()) return;
      const Transfer& first = read.transfers.front();
      if (read.direct) {
        fetch_into(worker.writer.place_of(first), {first.from, read.at, read.once}, worker.codes);
        worker.writer.placed(first);
      } else {
        fetch(worker, {first.from, read.at, read.once}, read.scale);
        put(worker, read);
      }
    });
    make(worker);
  }

  // Carries out the transfers that read no file. LoadOptions::caller must be called on the thread
  // that called load(), and run_workers runs the last worker there.
  void make(Worker& worker) {
    for_each_made_transfer(plan_, at_.rank, [&](const Transfer& transfer) {
      const bool is_callers = transfer.source == Transfer::Source::caller;
      if (!(is_callers ? worker.is_last() : worker.is_my_turn())) return;
      at_.board->check();
      worker.writer.make(transfer);
    });
  }

  // Strategy replica-striped: replicas have equal reads and take turns; each read is broadcast to
  // the group.
  void stream_in_turn(Worker& worker) {
    const std::vector<int> group = exchange_group(plan_, at_.rank);
    size_t turn = 0;
    for_each_read(plan_, at_.rank, worker.table(), [&](const Read& read) {
      const size_t root = turn++ % group.size();
      const bool reads = group[root] == at_.rank;
      if (reads) fetch(worker, {read.transfers.front().from, read.at}, read.scale);
      if (group.size() > 1) {  // with several meshes a rank may be its only replica
        at_.exchange->broadcast(static_cast<int>(root), worker.slot.first(read.bytes()));
      }
      if (!reads) received(read.bytes());
      put(worker, read);
    });
    make(worker);
  }

  // Strategy node-reader: the leader reads every byte that any rank of its node needs and
  // broadcasts it; each rank copies its part.
  void stream_on_node(Worker& worker) {
    const std::vector<int> group = exchange_group(plan_, at_.rank);
    const auto place = static_cast<size_t>(at_.rank - group.front());
    const bool reads = reads_storage(plan_, at_.rank);
    for_each_node_read(plan_, at_.rank, [&](const NodeRead& read) {
      at_.board->check();
      const NodeRead::Request& wanted = read.wanted[place];
      if (reads) fetch(worker, {read.stored, read.at}, read.scale);
      if (group.size() > 1) {
        at_.exchange->broadcast(0, worker.slot.first(read.bytes()), {wanted.begin, wanted.end});
      }
      const ScalesAtHand scales =
          scales_read(plan_, read.stored, read.scale, worker.slot.data() + read.at.bytes());
      const auto put = [&](const Transfer& part) {
        worker.writer.put(part, place_in(worker.slot, read.at.begin, part), scales);
      };
      if (wanted.bytes() > 0) {
        for_each_transfer_of(plan_, at_.rank, read.target, [&](const Transfer& transfer) {
          for_each_transfer_within(transfer, read, put);
        });
      }
      if (!reads) received(wanted.bytes());
    });
    make(worker);
  }

  // A part of a stored tensor, and whether no other rank of the node needs it.
  struct FetchedPart {
    uint32_t stored = 0;
    const Extent& at;
    bool once = false;
  };

  // One read, with a heartbeat.
  void fetch_into(std::span<std::byte> out, const FetchedPart& part, DataReader& reader) {
    at_.board->check();
    reader.leave_for(part.at.file);  // an error of the file before is not of this tensor
    naming_tensor(plan_.manifest->tensors[part.stored].spec.fqn,
                  [&] { reader.read(part.at.file, part.at.begin, out, part.once); });
    at_.board->beat(at_.rank, part.at.bytes());
  }

  // Reads stored bytes to the front of the worker's slot, and their scales right after them.
  void fetch(Worker& worker, const FetchedPart& part, const Extent& scale) {
    const uint64_t bytes = part.at.bytes();
    fetch_into(worker.slot.first(bytes), part, worker.codes);
    if (scale.bytes() == 0) return;
    fetch_into(worker.slot.subspan(bytes, scale.bytes()),
               {plan_.manifest->tensors[part.stored].scale->tensor, scale}, worker.scales);
  }

  // The address of a transfer's first element in a slot whose first byte is byte `begin` of the
  // file.
  const std::byte* place_in(std::span<std::byte> slot, uint64_t begin,
                            const Transfer& transfer) const {
    const StoredTensor& stored = plan_.manifest->tensors[transfer.from];
    return slot.data() +
           (extent_of(stored, transfer.runs.first, transfer.runs.length).begin - begin);
  }

  void received(uint64_t bytes) {
    outcome_.exchanged_bytes += bytes;
    at_.board->beat(at_.rank, bytes);
  }

  // Puts the elements of a finished read from the slot into the sink.
  void put(Worker& worker, const Read& read) {
    const ScalesAtHand scales = scales_read(plan_, read.transfers.front().from, read.scale,
                                            worker.slot.data() + read.at.bytes());
    for (const Transfer& transfer : read.transfers) {
      worker.writer.put(transfer, place_in(worker.slot, read.at.begin, transfer), scales);
    }
  }

  // Reads this rank's window. A rank that receives its tensors by broadcast has no reads.
  void fill_window(Worker& worker) {
    const bool once = reads_alone(plan_, at_.rank);
    window_.for_each_read([&](const RankWindow::Read& read) {
      if (!worker.is_my_turn()) return;
      fetch_into(window_memory_.bytes().subspan(read.place, read.at.bytes()),
                 {read.stored, read.at, once}, worker.codes);
    });
  }

  std::span<std::byte> bytes_of_whole(const RankWindow::WholeTensor& whole) const noexcept {
    return window_memory_.bytes().subspan(whole.place,
                                          plan_.manifest->tensors[whole.stored].at.bytes());
  }

  void put_from_window(const RankWindow::Tensor& tensor, const Transfer& transfer, Writer& writer) {
    ScalesAtHand scales;
    if (tensor.scale) scales.bytes = bytes_of_whole(*tensor.scale).data();
    const std::span<std::byte> elements = bytes_of_whole(tensor.elements);
    const uint64_t begin = plan_.manifest->tensors[transfer.from].at.begin;
    writer.put(transfer, place_in(elements, begin, transfer), scales);
  }

  // A strategy with a window, without an exchange: takes this rank's shards from the window.
  void cut_from_window(Worker& worker) {
    for_each_stored_transfer(plan_, at_.rank, [&](const Transfer& transfer) {
      if (!worker.is_my_turn()) return;
      at_.board->check();
      put_from_window(window_.tensor(transfer.from), transfer, worker.writer);
      at_.board->beat(at_.rank, 0);
    });
    make(worker);
  }

  void broadcast(const RankWindow::WholeTensor& whole) {
    const std::span<std::byte> tensor = bytes_of_whole(whole);
    at_.exchange->broadcast(0, tensor);
    received(reads_storage(plan_, at_.rank) ? 0 : tensor.size());
  }

  // Strategy rank0-broadcast: rank 0 has the whole model in its window, every other rank has one
  // tensor at a time.
  void broadcast_tensors(Worker& worker) {
    window_.for_each_tensor([&](const RankWindow::Tensor& tensor) {
      broadcast(tensor.elements);
      if (tensor.scale) broadcast(*tensor.scale);
      for_each_transfer_from(
          plan_, at_.rank, tensor.elements.stored,
          [&](const Transfer& transfer) { put_from_window(tensor, transfer, worker.writer); });
    });
    make(worker);
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
  check_context(at, plan, sink);
  const std::vector<Node>& nodes = plan.recipe->nodes;
  if (!options.caller && std::any_of(nodes.begin(), nodes.end(),
                                     [](const Node& node) { return node.op == Op::caller; })) {
    fail(Category::usage,
         "the recipe takes tensors of a caller, and LoadOptions::caller is not set");
  }
  return Load(checkpoint, plan, at, sink, options).run();
}

}  // namespace modicum

#include "modicum/stream/rank_workers.h"

#include <fmt/format.h>

#include <exception>
#include <mutex>
#include <new>

#include "modicum/stream/stream.h"

namespace modicum {

void check_context(const RankContext& at, const Plan& plan, const Sink& sink) {
  if (at.board == nullptr) fail(Category::usage, "RankContext::board is null");
  if (at.ledger == nullptr) fail(Category::usage, "RankContext::ledger is null");
  checked_rank(at.rank, plan, sink);
  if (at.board->ranks() >= plan.ranks()) return;
  fail(Category::usage, "the board has fewer ranks than the plan",
       {.rank = at.rank,
        .expected = fmt::format("{} or more", plan.ranks()),
        .got = std::to_string(at.board->ranks())});
}

void run_rank_workers(Board& board, int rank, int count, FunctionRef<void(int worker)> work) {
  std::mutex mutex;
  std::exception_ptr first;
  const auto fail_with = [&](const Error& error) {
    {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    board.report(record_of(error, rank));
  };
  run_workers(count, [&](int worker) {
    try {
      work(worker);
    } catch (const Error& error) {
      fail_with(error);
    } catch (const std::bad_alloc&) {
      fail_with(Error(Category::no_memory, "out of memory"));
    } catch (const std::exception& error) {  // thrown by a callback of the caller
      fail_with(Error(Category::internal, error.what()));
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace modicum

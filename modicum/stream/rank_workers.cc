#include "modicum/stream/rank_workers.h"

#include <exception>
#include <mutex>

namespace modicum {

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
    } catch (const std::exception& error) {  // thrown by a callback of the caller
      fail_with(Error(Category::internal, error.what()));
    }
  });
  if (first) std::rethrow_exception(first);
}

}  // namespace modicum

#include "modicum/ranks/thread_ranks_double.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "modicum/ranks/rank_body.h"

namespace modicum {

void run_ranks_in_threads(SharedBoard& board, Clock&, FunctionRef<void(int rank)> body,
                          const SuperviseOptions& options) {
  std::mutex mutex;
  std::condition_variable changed;
  int living = board.ranks();
  std::vector<std::jthread> ranks;  // joined in any case
  for (int rank = 0; rank < board.ranks(); ++rank) {
    ranks.emplace_back([&, rank] {
      run_rank_body(board, rank, body);
      const std::lock_guard lock(mutex);
      --living;
      changed.notify_all();
    });
  }
  try {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return living == 0; })) {
      options.tick();
    }
  } catch (const Error& error) {
    board.report(record_of(error, std::nullopt));
    throw;
  }
  ranks.clear();
  if (const auto failure = board.failure()) throw error_of(*failure);
}

}  // namespace modicum

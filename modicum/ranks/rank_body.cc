#include "modicum/ranks/rank_body.h"

#include <exception>
#include <new>

namespace modicum {

int run_rank_body(SharedBoard& board, int rank, FunctionRef<void(int rank)> body) noexcept {
  const auto end_with = [&](const Error& error) {
    board.report(record_of(error, rank));
    return exit_code(error.category());
  };
  try {
    body(rank);
    board.set_done(rank);
    return 0;
  } catch (const Error& error) {
    return end_with(error);
  } catch (const std::bad_alloc&) {
    return end_with(Error(Category::no_memory, "out of memory"));
  } catch (const std::exception& error) {
    return end_with(Error(Category::internal, error.what()));
  } catch (...) {  // must not unwind into the launcher's frames
    return end_with(Error(Category::internal, "an exception of no known type"));
  }
}

}  // namespace modicum

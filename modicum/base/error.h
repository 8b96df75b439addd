// Errors: one exception type, a closed list of categories, and facts as fields.
//
// Every failure ends the operation and is thrown as an `Error`. The category determines the exit
// code and the Python class. Facts such as the file and the tensor are fields, so that callers need
// not parse the message. The message is one line. An Error shares no state, so it can be passed to
// another thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace modicum {

// The closed list of docs/reference/errors.md, in the order of the table in error.cc.
enum class Category : uint8_t {
  format_trunc,
  format_limit,
  format_header,
  format_utf8,
  format_json,
  format_schema,
  format_dup,
  format_name,
  format_dtype,
  format_overflow,
  format_align,
  format_offsets,
  format_size,
  format_overlap,
  format_hole,
  format_trailing,
  format_pickle,
  index_json,
  index_schema,
  index_dup,
  index_path,
  index_missing_shard,
  index_missing_tensor,
  index_ambiguous,
  integrity,
  io,
  no_space,
  budget,
  no_memory,
  peer,
  stall,
  uncommitted,
  conflict,
  preempted,
  unsupported,
  mismatch,
  usage,
  internal,
  cancelled,
  count
};

std::string_view category_name(Category category) noexcept;  // "FORMAT.TRUNC", "BUDGET", ...
int exit_code(Category category) noexcept;                   // 10 for FORMAT.*, 15 for BUDGET, ...
// Whether the files of a checkpoint are damaged or incomplete: FORMAT.*, INDEX.*, INTEGRITY and
// UNCOMMITTED. Only such an error lets another checkpoint take its place. Any other one, such as IO
// or UNSUPPORTED, says nothing about the files, and ends the operation.
bool is_damage(Category category) noexcept;

// Memory held for one purpose. BUDGET and NOMEM errors have a list of owners.
struct Owner {
  std::string purpose;
  uint64_t bytes = 0;
};

// Details of a failure, all optional. The message contains all that are set, except `owners`,
// `shortfall_bytes`, and with that `expected` and `got`: they are numbers, for which
// `what_happened` has the text of over_budget.
struct Facts {
  std::string file;                    // base name of a file or directory
  std::string tensor;                  // FQN as stored in the file
  std::optional<uint64_t> offset;      // byte offset in `file`
  std::optional<int> rank;             // the rank that reports the failure
  std::optional<int> culprit_rank;     // the rank that caused the failure
  std::optional<int64_t> culprit_pid;  // the process at fault
  std::string expected;
  std::string got;
  std::optional<uint64_t> shortfall_bytes;  // BUDGET only: by how much the limit is exceeded
  std::vector<Owner> owners;                // BUDGET and NOMEM only, largest first
};

class Error : public std::exception {
 public:
  Error(Category category, std::string what_happened, Facts facts = {});

  Category category() const noexcept { return category_; }
  const std::string& what_happened() const noexcept { return what_happened_; }
  const Facts& facts() const noexcept { return facts_; }
  // "CATEGORY: what happened (file F, tensor T, offset O, rank R, culprit rank C, pid P,
  // expected X, got Y)"
  const char* what() const noexcept override { return line_.c_str(); }

 private:
  Category category_;
  std::string what_happened_;
  Facts facts_;
  std::string line_;
};

[[noreturn]] void fail(Category category, std::string what_happened, Facts facts = {});

// Returns `index`. Throws USAGE unless it is below `count`. `noun` names the counted things.
size_t checked_index(std::string_view noun, size_t index, size_t count);
// Returns `rank`. Throws USAGE unless it is in [0, world_size).
int checked_rank(int rank, int world_size);

// Calls `fn`. If `fn` throws an Error without a tensor, rethrows it with `fqn` as its tensor.
template <typename Fn>
void naming_tensor(const std::string& fqn, Fn fn) {
  try {
    fn();
  } catch (const Error& error) {
    Facts facts = error.facts();
    if (facts.tensor.empty()) facts.tensor = fqn;
    fail(error.category(), error.what_happened(), std::move(facts));
  }
}

// Returns fn(). If `fn` throws an Error without a file, rethrows it with `name`, the base name of a
// file, as its file.
template <typename Fn>
auto naming_file(const std::string& name, Fn fn) {
  try {
    return fn();
  } catch (const Error& error) {
    Facts facts = error.facts();
    if (facts.file.empty()) facts.file = name;
    fail(error.category(), error.what_happened(), std::move(facts));
  }
}

// A name from a file, made printable: control bytes become \xNN. Once the result has 256 bytes or
// more, "..." replaces the rest of the name.
std::string printable(std::string_view name);

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line);

}  // namespace modicum

// Programmer errors, checked in release builds too: throws INTERNAL (exit code 70).
#define MODICUM_ASSERT(condition) \
  ((condition) ? void(0) : ::modicum::assertion_failed(#condition, __FILE__, __LINE__))

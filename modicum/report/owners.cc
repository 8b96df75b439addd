#include "modicum/report/owners.h"

#include <algorithm>
#include <array>

namespace modicum {
namespace {

// The purposes of a ledger, the owners of `watch`, of recordings made in Python and of DeepSpeed.
constexpr std::array<OwnerWords, 25> kOwners = {{
    {"process", "program and libraries"},
    {"page_tables", "page tables"},
    {"header", "checkpoint headers"},
    {"plan", "plan and bookkeeping"},
    {"shards", "parameters"},
    {"window", "window of whole tensors"},
    {"master", "master weights"},
    {"grad", "gradients"},
    {"moments", "moments"},
    {"staging", "staging"},
    {"pinned_rounding", "rounding of pinned buffers"},
    {"init", "initialised tensors"},
    {"snapshot", "snapshot of a save"},
    {"fork", "copies that forks may make"},
    {"copies_since_fork", "copies since a fork"},
    {"retained_heap", "heap kept by malloc"},
    {"unexplained", "unexplained"},
    {"held", "not attributed"},
    {"malloc_heap", "malloc's main heap"},
    {"malloc_arenas", "malloc's heaps of threads"},
    {"stacks", "stacks"},
    {"file_copies", "written pages of files"},
    {"anonymous", "anonymous mappings"},
    {"shared_memory", "shared memory"},
    {"children", "child processes"},
}};

}  // namespace

std::span<const OwnerWords> owners_in_words() noexcept { return kOwners; }

std::string owner_words(std::string_view owner) {
  const auto known = std::find_if(kOwners.begin(), kOwners.end(), [owner](const OwnerWords& entry) {
    return entry.owner == owner;
  });
  if (known != kOwners.end()) return std::string(known->words);
  std::string words(owner);
  std::replace(words.begin(), words.end(), '_', ' ');
  return words;
}

}  // namespace modicum

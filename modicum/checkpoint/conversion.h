// The record of a conversion: which files of its output are finished. Part of the public header of
// `checkpoint`.
//
//   PARENT/NAME              the output; exists only once it is complete and durable
//   PARENT/.NAME.partial/    the output's files until it is complete
//   PARENT/.NAME.journal     the converting process, the inputs, and the finished files
//   PARENT/.NAME.owner       who converts (owner.h), from before the first of the others is made
//                            until the output is visible
//
// A conversion that was killed can be resumed: every file in the journal is durable, and is kept if
// the new call has the same inputs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "modicum/checkpoint/durable.h"
#include "modicum/checkpoint/owner.h"
#include "modicum/checkpoint/range_loss.h"
#include "modicum/checkpoint/run.h"
#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

// What a tensor of the output has lost by its cast.
struct TensorLoss {
  std::string tensor;
  std::string file;  // the stored file of the first overflowed element; may be empty
  RangeLoss loss;

  bool operator==(const TensorLoss&) const = default;
};

constexpr uint64_t kLongestJournal = 2 * kLongestText;  // the longest one that is read

struct ConvertedFile {
  std::string name;  // relative to the output
  uint64_t bytes = 0;
  uint64_t digest = 0;  // the file's part of the output's digest
  // Tensors that have lost something; empty in a journal of a version that did not count losses.
  std::optional<std::vector<TensorLoss>> losses;

  bool operator==(const ConvertedFile&) const = default;
};

// Not thread-safe.
class ConversionJournal {
 public:
  struct Inputs {
    Digest digest;    // covers everything that determines the output's bytes
    SaveOwner owner;  // this process
    // Whether a process is known to have ended; asked only for a journal of modicum 0.1.
    std::function<bool(const SaveOwner&)> is_dead;
    bool needs_losses = false;  // a file without ConvertedFile::losses counts as unfinished
    bool adopts = false;        // takes over from an owner that can't be asked (Life::silent)
  };
  // Begins a conversion to `out`, or resumes an earlier one with equal inputs. Removes the files of
  // an earlier conversion with other inputs. Throws CONFLICT if `out` exists, if the partial
  // directory or the journal is a symbolic link, or if another process that is not known to be dead
  // converts to `out`; UNSUPPORTED for the journal of a later version; IO; NOSPACE. Before these
  // errors nothing is removed or made.
  ConversionJournal(FileSystem& files, const std::string& out, const Inputs& inputs);
  ~ConversionJournal();
  ConversionJournal(const ConversionJournal&) = delete;
  ConversionJournal& operator=(const ConversionJournal&) = delete;

  // The directory into which the files are written.
  const std::string& directory() const noexcept { return partial_; }
  // The finished file of this name and size; null if there is none.
  const ConvertedFile* finished(const std::string& name, uint64_t bytes) const noexcept;
  // Removes a file, and its entry, that the journal lists but `finished` does not return.
  void forget(const std::string& name);
  // The finished files in the journal on disk, including those that a forked process has added.
  // Another process may have changed it. Throws IO.
  std::vector<ConvertedFile> recorded() const;
  // Records a finished file, which must already be durable. Throws CONFLICT if another process has
  // taken over; UNSUPPORTED if the journal would be too long to be read again; IO; NOSPACE.
  void add(ConvertedFile file);
  // Makes the output visible and durable. Warns if only removing the journal failed. On failure the
  // output is not visible, and the same conversion resumes. Throws CONFLICT if another process has
  // taken over, or if the output's name has been taken meanwhile; IO; NOSPACE.
  Publication publish();

 private:
  void refuse_existing();
  void refuse_links();
  void become_owner(const Inputs& inputs);
  std::unique_ptr<LockedFile> take_over(std::unique_ptr<LockedFile> file, SeenFile seen,
                                        const Inputs& inputs);
  void read_journal(const Inputs& inputs);
  void keep_finished();
  void remove_unfinished(const std::string& folder);
  void write_journal();

  FileSystem& files_;
  const std::string parent_, name_, partial_;  // `parent_`: its real path
  bool is_durable_ = true;  // whether the name of `parent_` is, if this conversion has made it
  const OwnerRecord record_;
  std::unique_ptr<OwnerFile> owner_;
  Digest inputs_;
  std::vector<ConvertedFile> finished_;
};

}  // namespace modicum

// The record of a conversion: which files of its output are finished. Part of the public header of
// `checkpoint`.
//
//   PARENT/NAME              the output; exists only once it is complete and durable
//   PARENT/.NAME.partial/    the output's files until then
//   PARENT/.NAME.journal     the converting process, the inputs, and the finished files
//
// A conversion that was killed resumes: every file in the journal is durable, and is kept if the
// inputs are the same.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "modicum/checkpoint/step.h"
#include "modicum/io/io.h"
#include "modicum/spec/spec.h"

namespace modicum {

struct ConvertedFile {
  std::string name;  // relative to the output; may be in kStateDirectory or kExtraDirectory
  uint64_t bytes = 0;
  uint64_t digest = 0;           // the file's part of the output's digest
  std::vector<uint64_t> chunks;  // of a step's file: StepTensor::chunks of its tensors, in order

  bool operator==(const ConvertedFile&) const = default;
};

// Not thread-safe.
class ConversionJournal {
 public:
  struct Inputs {
    Digest digest;    // covers everything that decides the output's bytes
    StepOwner owner;  // this process
    std::function<bool(const StepOwner&)> is_dead;  // whether an earlier call's process has ended
  };
  // Begins a conversion to `out`, or resumes an earlier one with equal inputs. Removes the files of
  // an earlier one with other inputs. Throws CONFLICT if `out` exists or a live process converts to
  // it; IO; NOSPACE.
  ConversionJournal(FileSystem& files, const std::string& out, const Inputs& inputs);

  const std::string& directory() const noexcept { return partial_; }  // to write into
  // The finished file of this name and size; null if there is none.
  const ConvertedFile* finished(const std::string& name, uint64_t bytes) const noexcept;
  // The finished files in the journal on disk, including those that a forked process has added.
  // Throws IO.
  std::vector<ConvertedFile> recorded() const;
  // Records a finished file, which must already be durable. Throws IO or NOSPACE.
  void add(ConvertedFile file);
  // Makes the output visible and durable. Throws CONFLICT if a file of that name has appeared; IO;
  // NOSPACE.
  void publish();

 private:
  void read_journal(const Inputs& inputs);
  void keep_finished();
  void remove_unfinished(const std::string& folder);
  void write_journal();

  FileSystem& files_;
  const std::string parent_, name_, partial_;
  StepOwner owner_;
  Digest inputs_;
  std::vector<ConvertedFile> finished_;
};

}  // namespace modicum

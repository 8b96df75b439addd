#include "modicum/checkpoint/conversion.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/checkpoint/durable.h"
#include "modicum/checkpoint/parts.h"
#include "modicum/checkpoint/record_text.h"
#include "modicum/json/json.h"

namespace modicum {
namespace {

constexpr int64_t kJournalVersion = 1;  // of journals; those without a version have this one

// The content of a journal.
struct Journal {
  SaveOwner owner;
  std::string uuid;  // OwnerRecord::uuid; modicum 0.1 wrote none
  std::string inputs;
  std::vector<ConvertedFile> files;
};

void losses_member(JsonWriter& out, const std::vector<TensorLoss>& losses) {
  out.key("losses").begin_array();
  for (const TensorLoss& tensor_loss : losses) {
    out.begin_object().member("tensor", tensor_loss.tensor).member("file", tensor_loss.file);
    out.member("overflowed", tensor_loss.loss.overflowed)
        .member("underflowed", tensor_loss.loss.underflowed);
    out.member("first_index", tensor_loss.loss.first_index)
        .member("first_value", tensor_loss.loss.first_value);
    out.member("largest", tensor_loss.loss.largest).end_object();
  }
  out.end_array();
}

std::string journal_json(const Journal& journal) {
  JsonWriter out;
  out.begin_object();
  owner_members(out, journal.owner);
  out.member("uuid", journal.uuid);
  out.member("inputs", journal.inputs).key("files").begin_array();
  for (const ConvertedFile& file : journal.files) {
    out.begin_object().member("name", file.name).member("bytes", file.bytes);
    out.member("digest", hex(file.digest));
    out.key("chunks").begin_array().end_array();  // modicum 0.1 requires the member
    if (file.losses) losses_member(out, *file.losses);
    out.end_object();
  }
  return out.end_array().end_object().text();
}

// Without names the memory of all entries would be many times their text.
void require_name(const std::string& name) {
  if (name.empty()) fail(Category::integrity, "an entry of the journal has no name");
}

TensorLoss read_loss(JsonValue& value) {
  TensorLoss tensor_loss;
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "tensor") tensor_loss.tensor = member.string();
    if (key == "file") tensor_loss.file = member.string();
    if (key == "overflowed") tensor_loss.loss.overflowed = member.integer();
    if (key == "underflowed") tensor_loss.loss.underflowed = member.integer();
    if (key == "first_index") tensor_loss.loss.first_index = member.integer();
    if (key == "first_value") tensor_loss.loss.first_value = member.number();
    if (key == "largest") tensor_loss.loss.largest = member.number();
  });
  require_name(tensor_loss.tensor);
  return tensor_loss;
}

ConvertedFile read_converted_file(JsonValue& value) {
  ConvertedFile file;
  value.object([&](std::string_view key, JsonValue& member) {
    if (key == "name") file.name = member.string();
    if (key == "bytes") file.bytes = static_cast<uint64_t>(member.integer());
    if (key == "digest") file.digest = hex_value(member, "journal");
    if (key != "losses") return;
    file.losses.emplace();
    member.array([&](JsonValue& loss) { file.losses->push_back(read_loss(loss)); });
  });
  require_name(file.name);
  return file;
}

// Empty if the text is not JSON, or a member has another type than in a journal. Throws UNSUPPORTED
// for a journal that a later version of Modicum has written. `name`: the file's.
std::optional<Journal> parse_journal(const std::string& text, const std::string& name) {
  Journal journal;
  try {
    read_json(text, [&](JsonValue& root) {
      root.object([&](std::string_view key, JsonValue& member) {
        if (key == "version") require_version(member.integer(), kJournalVersion, name);
        read_owner_member(key, member, journal.owner);
        if (key == "uuid") journal.uuid = member.string();
        if (key == "inputs") journal.inputs = member.string();
        if (key != "files") return;
        member.array([&](JsonValue& file) { journal.files.push_back(read_converted_file(file)); });
      });
    });
  } catch (const JsonError&) {
    return std::nullopt;
  } catch (const Error& error) {
    if (error.category() == Category::unsupported) throw;
    return std::nullopt;
  }
  return journal;
}

// Throws CONFLICT unless the owner is dead, or silent and adopted. `name`: the output's.
void require_no_owner(Life life, const SaveOwner& owner, bool is_adopted, const std::string& name) {
  if (life == Life::dead || (life == Life::silent && is_adopted)) return;
  const std::string why =
      life == Life::lives
          ? "; --adopt takes over only from a process that can't be asked"
          : ", or has ended on another host within the last 10 minutes; --adopt takes over what it "
            "has finished";
  fail(Category::conflict,
       fmt::format("another process converts to the same output (.{}.journal){}", printable(name),
                   why),
       {.file = name, .got = fmt::format("pid {} of {}", owner.pid, printable(owner.host))});
}

// Empty as parse_journal, and for a text that is too long.
std::optional<Journal> journal_at(FileSystem& files, const std::string& path) {
  const std::unique_ptr<File> file = files.open(path);
  if (file->identity().size_bytes > kLongestJournal) return std::nullopt;
  return parse_journal(read_text(*file, kLongestJournal, Category::integrity), base_name(path));
}

}  // namespace

ConversionJournal::ConversionJournal(FileSystem& files, const std::string& out,
                                     const Inputs& inputs)
    : files_(files),
      parent_(real_directory(files, parent_path(out))),
      name_(base_name(out)),
      partial_(join_path(parent_, fmt::format(".{}.partial", name_))),
      record_{inputs.owner, make_uuid()},
      inputs_(inputs.digest) {
  refuse_existing();
  refuse_links();
  if (ensure_directory(files_, parent_)) is_durable_ = files_.sync_directory(parent_path(parent_));
  become_owner(inputs);
  try {
    refuse_existing();  // since the first check another process may have published it
    read_journal(inputs);
    if (!files_.is_directory(partial_)) {  // then no recorded file exists either
      finished_.clear();
      files_.make_directory(partial_);
    }
    write_journal();
    keep_finished();
  } catch (const Error&) {
    owner_->remove();
    throw;
  }
}

ConversionJournal::~ConversionJournal() {
  try {
    owner_->remove();
  } catch (const Error&) {
    // The lock ends all the same, so the next conversion can take the file.
  }
}

void ConversionJournal::refuse_existing() {
  if (!is_listed(files_, parent_, name_)) return;
  fail(Category::conflict, "the output exists already", {.file = name_});
}

// Before anything is removed or made: of two processes that begin at once, one gets the lock.
void ConversionJournal::become_owner(const Inputs& inputs) {
  const std::string path = join_path(parent_, fmt::format(".{}.owner", name_));
  std::unique_ptr<LockedFile> file = files_.lock(path);
  while (!file || !file->is_new()) {
    if (const std::optional<SeenFile> seen = files_.look_at(path)) {
      file = take_over(std::move(file), *seen, inputs);
      break;
    }
    file = files_.lock(path);  // its owner has just ended
  }
  owner_ = std::make_unique<OwnerFile>(files_, path, std::move(file), record_);
}

// `file`: the owner file of another process, if it could be locked. Returns the file for this one.
// Throws CONFLICT if that process may be alive.
std::unique_ptr<LockedFile> ConversionJournal::take_over(std::unique_ptr<LockedFile> file,
                                                         SeenFile seen, const Inputs& inputs) {
  OwnerCheck owners(files_, parent_, inputs.owner, inputs.is_dead);
  const OwnerRecord record = parse_owner(seen.text).value_or(OwnerRecord{});
  const bool is_locked = file && file->is_exclusive();
  if (is_locked) seen.lock = LockState::free;  // but for this process
  const bool is_dead = is_locked && !owners.may_be_elsewhere(seen) && record.is_locked;
  require_no_owner(is_dead ? Life::dead : owners.of_file(seen), record.process, inputs.adopts,
                   name_);
  if (file) return file;
  // Its owner, on another kernel, is dead or adopted, but the file server still has its lock.
  const std::string replacement = join_path(parent_, fmt::format(".{}.{}", name_, record_.uuid));
  file = files_.lock(replacement);
  if (!file) fail(Category::conflict, "another process has the new file", {.file = name_});
  file->write(owner_json(record_));
  files_.rename(replacement, join_path(parent_, fmt::format(".{}.owner", name_)));
  return file;
}

// No conversion makes them. What they name may be anybody's files.
void ConversionJournal::refuse_links() {
  for (const char* const suffix : {"partial", "journal", "owner"}) {
    const std::string name = fmt::format(".{}.{}", name_, suffix);
    if (!is_link(files_, join_path(parent_, name))) continue;
    fail(Category::conflict, "a symbolic link is where the conversion keeps its own files",
         {.file = name});
  }
}

void ConversionJournal::read_journal(const Inputs& inputs) {
  const std::string path = join_path(parent_, fmt::format(".{}.journal", name_));
  std::optional<Journal> journal;
  if (files_.exists(path)) journal = journal_at(files_, path);
  if (journal && journal->uuid.empty()) {
    OwnerCheck owners(files_, parent_, inputs.owner, inputs.is_dead);
    require_no_owner(owners.of_name(journal->owner), journal->owner, inputs.adopts, name_);
  }
  if (journal && journal->inputs == inputs.digest.hex()) {
    finished_ = std::move(journal->files);
    if (inputs.needs_losses) {
      std::erase_if(finished_, [](const ConvertedFile& file) { return !file.losses; });
    }
  } else if (files_.is_directory(partial_)) {
    files_.remove_tree(partial_);  // files made from other inputs, or without a valid journal
  }
}

// Removes unfinished files. A finished file that is missing or has another size counts as
// unfinished.
void ConversionJournal::keep_finished() {
  const auto bytes_of_file = [&](const std::string& name) {
    const std::string path = join_path(partial_, name);
    return files_.exists(path) ? files_.open(path)->identity().size_bytes : UINT64_MAX;
  };
  std::erase_if(finished_,
                [&](const ConvertedFile& file) { return bytes_of_file(file.name) != file.bytes; });
  remove_unfinished("");
}

// `folder`: a folder of the output with a '/' at the end, or "" for the output itself.
void ConversionJournal::remove_unfinished(const std::string& folder) {
  for (const std::string& entry : files_.list(join_path(partial_, folder))) {
    const std::string name = folder + entry;
    const std::string path = join_path(partial_, name);
    if (folder.empty() && files_.is_directory(path) && !is_link(files_, path)) {
      remove_unfinished(name + "/");
      continue;
    }
    const bool is_finished = std::any_of(finished_.begin(), finished_.end(),
                                         [&](const auto& file) { return file.name == name; });
    if (!is_finished) files_.remove_tree(path);
  }
}

std::vector<ConvertedFile> ConversionJournal::recorded() const {
  const std::string path = join_path(parent_, fmt::format(".{}.journal", name_));
  std::optional<Journal> journal = journal_at(files_, path);
  if (!journal) fail(Category::io, "the journal can't be read", {.file = base_name(path)});
  return std::move(journal->files);
}

const ConvertedFile* ConversionJournal::finished(const std::string& name,
                                                 uint64_t bytes) const noexcept {
  for (const ConvertedFile& file : finished_) {
    if (file.name == name && file.bytes == bytes) return &file;
  }
  return nullptr;
}

void ConversionJournal::forget(const std::string& name) {
  const auto removed =
      std::erase_if(finished_, [&](const auto& file) { return file.name == name; });
  if (removed > 0) files_.remove_tree(join_path(partial_, name));
}

void ConversionJournal::add(ConvertedFile file) {
  owner_->require_ours();
  files_.sync_directory(partial_);
  finished_.push_back(std::move(file));
  write_journal();
}

void ConversionJournal::write_journal() {
  const std::string name = fmt::format(".{}.journal", name_);
  const std::string text = journal_json({record_.process, record_.uuid, inputs_.hex(), finished_});
  require_readable(text.size(), name, kLongestJournal);
  replace_durably(files_, {parent_, name, name + ".new"}, text);
}

Publication ConversionJournal::publish() {
  owner_->require_ours();
  const bool is_durable = files_.sync_directory(partial_);
  Publication published = publish_directory(files_, partial_, join_path(parent_, name_));
  published.depend_on(is_durable && is_durable_);
  const std::string journal = fmt::format(".{}.journal", name_);
  try {
    files_.remove(join_path(parent_, journal));
  } catch (const Error& error) {
    published.warnings.push_back(fmt::format(
        "the output is complete, but {} could not be removed: {}", journal, error.what()));
  }
  return published;
}

}  // namespace modicum

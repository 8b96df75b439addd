#include "modicum/watch/command.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <map>
#include <system_error>
#include <utility>

#include "modicum/base/base.h"
#include "modicum/watch/cage.h"
#include "modicum/watch/deaths.h"
#include "modicum/watch/forwarded_signals.h"
#include "modicum/watch/oom_log.h"
#include "modicum/watch/sampler.h"
#include "modicum/watch/start.h"

namespace modicum {
namespace {

int64_t cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * kNsPerSecond + time.tv_nsec;
}

std::string reason(int error) { return std::generic_category().message(error); }

// Blocks the forwarded signals and SIGCHLD, and has a descriptor for SIGCHLD. (An ignored SIGCHLD
// would not arrive.)
class Signals {
 public:
  Signals() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    for (const int signal : kForwardedSignals) sigaddset(&set, signal);
    sigprocmask(SIG_BLOCK, &set, &before_);
    if (fd_ < 0) fail(Category::io, "cannot receive signals: signalfd: " + reason(errno));
  }
  ~Signals() {
    close(fd_);
    restore();
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const noexcept { return fd_; }
  // Restores what the command inherits.
  void restore() const noexcept {
    child_signal_.restore();
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  void read_all() const noexcept {
    signalfd_siginfo info{};
    while (read(fd_, &info, sizeof info) == sizeof info) {
    }
  }

 private:
  const ChildSignal child_signal_;
  sigset_t before_{};
  int fd_ = -1;
};

class Watcher {
 public:
  Watcher(const WatchTask& task, FileSystem& files) : task_(task) {
    if (task.limit_bytes) cage_.emplace(files, *task.limit_bytes);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    groups_ = cage_ ? std::vector{cage_->group()} : memory_cgroups();
    deaths_.emplace(counting_group(groups_));
    pressure_before_ = memory_pressure(groups_);
    begin_ns_ = clock_.now_ns();
    const Start start{
        .task = task, .entry = cage_ ? cage_->entry() : "", .reports = reports_.path()};
    command_ = start_command(start, [this] { signals_.restore(); });
    start_forwarding();
    sampler_.emplace(
        clock_,
        SamplerOptions{.root_pid = getpid(),
                       .cpu_ns = cpu_ns,
                       .cage = cage_ ? std::optional(cage_->group()) : std::nullopt,
                       .group = groups_.empty() ? std::nullopt : std::optional(groups_.front()),
                       .limit_bytes = task.limit_bytes.value_or(0),
                       .forked_rss_bytes = read_status(getpid()).value_or(ProcessStatus()).peak_rss,
                       .reports = &table_,
                       .is_same_program = [this](int pid) { return is_same_program(pid); }});
  }

  WatchRecord run() {
    while (!status_) {
      const int64_t due_ns = clock_.now_ns() + sampler_->pause_ns();
      take_sample();
      while (!status_ && wait_until(due_ns)) {
      }
    }
    wait_until(0);  // handles processes that ended together with the command
    sampler_->sample();
    note_kill({});
    return finish();
  }

 private:
  void start_forwarding() {
    try {
      forwarded_.emplace(command_);
    } catch (const Error&) {
      kill(command_, SIGKILL);  // as if it had not been started
      waitpid(command_, nullptr, 0);
      throw;
    }
  }

  void take_sample() {
    sampler_->sample();
    std::vector<int> alive = sampler_->alive();
    deaths_->follow(alive);
    std::sort(alive.begin(), alive.end());
    forwarded_->set_watched(std::move(alive));
    note_kill({});  // the killed process may have begun and ended between two samples
    if (limits_.empty() || clock_.now_ns() - limits_ns_ > kNsPerSecond) {
      limits_ = memory_limits();
      limits_ns_ = clock_.now_ns();
    }
  }

  // Whether process `pid` still runs the program that has marked the table, or is ending.
  bool is_same_program(int pid) const {
    if (reports_.is_marked_by(pid)) return true;
    const auto status = read_status(pid);
    // A process that has lost the mark and has memory has run exec: an ending one frees its memory
    // first.
    return !status || !status->is_alive || status->peak_rss == 0;
  }

  // Handles the next ends of processes. Returns false if none come before `due_ns`.
  bool wait_until(int64_t due_ns) {
    std::vector<pollfd> waited = {{signals_.fd(), POLLIN, 0}};
    deaths_->add_to(waited);
    const int64_t left_ns = std::max<int64_t>(0, due_ns - clock_.now_ns());
    const timespec left{left_ns / kNsPerSecond, left_ns % kNsPerSecond};
    const int ready = ppoll(waited.data(), waited.size(), &left, nullptr);
    if (ready <= 0) return false;
    const std::vector<int> dead = deaths_->ended(waited);
    for (const int pid : dead) keep_status(pid);
    if ((waited[0].revents & POLLIN) != 0) wait_for_ended();
    if (!dead.empty()) note_kill(dead);
    for (const int pid : dead) statuses_.erase(pid);
    return true;
  }

  void keep_status(int pid) {
    if (const auto status = read_wait_status(pid)) statuses_.emplace(pid, *status);
  }

  void wait_for_ended() {
    signals_.read_all();
    forwarded_->pause_for([this] {
      while (true) {  // as a subreaper, this process also waits for orphaned descendants
        int status = 0;
        rusage usage{};
        const pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid <= 0) return status_.has_value();
        sampler_->note_end(pid, static_cast<uint64_t>(usage.ru_maxrss) * kKiB);
        statuses_[pid] = status;
        if (pid == command_) status_ = status;
      }
    });
  }

  void read_log() {
    for (OomKill& kill : log_.next()) logged_.push_back(std::move(kill));
  }

  // Whether the kernel has counted a kill, or logged one of a watched process. It logs a kill after
  // it has counted it: others that it logged before, without a new count, were in another cgroup.
  bool has_new_kill() {
    read_log();
    if (deaths_->has_new_kill()) return true;
    const bool is_ours = std::any_of(logged_.begin(), logged_.end(), [&](const OomKill& kill) {
      return sampler_->find(kill.pid) != nullptr;  // the command may have made a cgroup for it
    });
    if (!is_ours) logged_.clear();
    return is_ours;
  }

  // Returns the kill of a watched process that the kernel has logged, if any. Waits up to 20 ms for
  // the message, which the kernel writes right after it has counted the kill.
  std::optional<OomKill> logged_kill() {
    for (int attempt = 0; log_.is_readable() && attempt < 10; ++attempt) {
      read_log();
      for (const OomKill& kill : logged_) {
        // The killed process may never have been sampled; then its cgroup identifies it.
        const bool is_in_cage = cage_ && kill.group.ends_with(cage_->name());
        if (is_in_cage || sampler_->find(kill.pid) != nullptr) return kill;
      }
      clock_.sleep_ns(2 * kNsPerMs);
    }
    // The kernel's rate limit may have dropped the message that names the cgroup.
    std::vector<OomKill> without_group = logged_;
    std::erase_if(without_group, [](const OomKill& kill) { return !kill.group.empty(); });
    if (cage_ && without_group.size() == 1) return without_group.front();
    return std::nullopt;
  }

  // Records the first kill. `dead`: the processes that have just ended.
  void note_kill(const std::vector<int>& dead) {
    if (killed_ || !has_new_kill()) return;
    std::optional<OomKill> kill = logged_kill();
    const bool is_logged = kill.has_value();
    if (!kill) {
      const std::optional<int> pid = deaths_->killed_of(dead, statuses_, *sampler_);
      if (!pid) return forget_foreign_kills();
      const WatchedProcess* const process = sampler_->find(*pid);
      kill = OomKill{.pid = *pid,
                     .name = process != nullptr ? process->name : "",
                     .held_bytes = sampler_->last_held(*pid)};
    }
    record_kill(*kill, is_logged);
  }

  // The log names each kill; where it can't be read, time tells.
  void forget_foreign_kills() {
    if (!cage_ && logged_.size() >= deaths_->new_kills()) {
      deaths_->forget();
    } else {
      deaths_->forget_old(clock_.now_ns(), sampler_->is_ending());
    }
  }

  void record_kill(const OomKill& kill, bool is_logged) {
    if (sampler_->find(kill.pid) == nullptr) {
      sampler_->add_unseen(kill.pid, kill.name, kill.held_bytes);
    }
    const uint64_t held_bytes =
        sampler_->add_kill(kill.pid, is_logged ? std::optional(kill.held_bytes) : std::nullopt);
    const WatchedProcess* const process = sampler_->find(kill.pid);
    const WatchSample& last = sampler_->last();
    killed_ = WatchedKill{.pid = kill.pid,
                          .name = kill.name,
                          .rank = process->rank,
                          .at_s = static_cast<double>(clock_.now_ns() - begin_ns_) / kNsPerSecond,
                          .held_bytes = held_bytes,
                          .tree_held_bytes = last.held_bytes,
                          .unread_copies_bytes = last.unread_copies_bytes,
                          .by_group_bytes = last.by_group_bytes,
                          .page_cache_bytes = last.page_cache_bytes,
                          .phase = sampler_->phase_of(kill.pid).name,
                          .promised_bytes = promised_with(kill.pid)};
    if (task_.limit_bytes) {
      killed_->limit_bytes = *task_.limit_bytes;
      killed_->limit_source = "--limit";
    } else if (!limits_.empty()) {
      killed_->limit_bytes = limits_.front().limit_bytes;
      killed_->limit_source = limits_.front().source;
    }
    const TreeSampler::Growth growth = sampler_->growth(kNsPerSecond, kill.pid);
    if (growth.bytes == 0) return;
    const WatchedProcess* const grew = sampler_->find(growth.pid);
    killed_->grew_pid = growth.pid;
    killed_->grew_name = grew != nullptr ? grew->name : kill.name;
    killed_->grew_bytes = growth.bytes;
    killed_->grew_s = growth.seconds;
    if (growth.owner != static_cast<size_t>(WatchOwner::unattributed)) {
      killed_->grew_owner = watch_owner_name(growth.owner);
    }
  }

  // WatchedKill::promised_bytes, if process `pid` is killed.
  uint64_t promised_with(int pid) {
    if (!sampler_->phase_of(pid).promised_bytes) return 0;
    uint64_t sum = 0;
    for (const int child : sampler_->alive()) {
      sum += sampler_->phase_of(child).promised_bytes.value_or(sampler_->last_held(child));
    }
    return sum + page_table_bytes(sum);
  }

  std::optional<MemoryPressure> pressure_since() const {
    auto now = memory_pressure(groups_);
    if (!now || !pressure_before_ || now->source != pressure_before_->source) return std::nullopt;
    now->some_us -= std::min(now->some_us, pressure_before_->some_us);
    now->full_us -= std::min(now->full_us, pressure_before_->full_us);
    return now;
  }

  WatchRecord finish() {
    WatchRecord record{
        .command = task_.command, .limit_bytes = task_.limit_bytes, .limit_text = task_.limit_text};
    record.exit_code = WIFSIGNALED(*status_) ? 128 + WTERMSIG(*status_) : WEXITSTATUS(*status_);
    record.elapsed_s = static_cast<double>(clock_.now_ns() - begin_ns_) / kNsPerSecond;
    record.killed = killed_;
    record.pressure = pressure_since();
    record.left_running = static_cast<int>(sampler_->alive().size());
    sampler_->finish(record);
    for (const MemoryLimit& limit : limits_) {
      if (!limit.source.starts_with("cgroup")) continue;
      record.group_limit_bytes =
          std::min(record.group_limit_bytes.value_or(UINT64_MAX), limit.limit_bytes);
    }
    record.cpu_s = static_cast<double>(cpu_ns()) / kNsPerSecond;
    record.watcher_peak_bytes = read_process_memory().peak_held();
    return record;
  }

  const WatchTask& task_;
  SteadyClock clock_;
  const Signals signals_;
  OomLog log_;
  const SharedPages reports_ = SharedPages::make(sizeof(SelfReports));
  SelfReports& table_ = SelfReports::make_in(reports_.bytes());
  std::optional<MemoryCage> cage_;
  std::optional<Deaths> deaths_;
  std::optional<ForwardedSignals> forwarded_;
  std::optional<TreeSampler> sampler_;
  int64_t begin_ns_ = 0;
  int command_ = 0;
  std::optional<int> status_;        // the command's status of wait(2), once it has ended
  std::map<int, int> statuses_;      // statuses of wait(2) by pid, of processes that just ended
  std::vector<MemoryLimit> limits_;  // of this process, read once per second
  int64_t limits_ns_ = 0;
  std::vector<MemoryCgroup> groups_;  // the command's cgroup, or the watcher's and its ancestors
  std::optional<MemoryPressure> pressure_before_;
  std::vector<OomKill> logged_;  // since a kill was last counted
  std::optional<WatchedKill> killed_;
};

}  // namespace

WatchRecord watch_command(const WatchTask& task, FileSystem& files) {
  Watcher watcher(task, files);
  return watcher.run();
}

}  // namespace modicum

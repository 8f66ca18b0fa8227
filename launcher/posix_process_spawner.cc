#include "launcher/posix_process_spawner.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/line_prefix.h"
#include "launcher/printable.h"
#include "launcher/process_tree.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kKillTimeout = absl::Seconds(10);
constexpr char kErrorFileVariable[] = "TORCHELASTIC_ERROR_FILE";

absl::Status ErrnoStatus(const std::string& what) {
  const std::string text = absl::StrCat(what, ": ", std::strerror(errno));
  if (errno == EMFILE || errno == ENFILE || errno == EAGAIN || errno == ENOMEM) {
    return absl::ResourceExhaustedError(text);
  }
  return absl::InternalError(text);
}

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

absl::StatusOr<UniqueFd> OpenNull() {
  UniqueFd file(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (!file.valid()) return ErrnoStatus("cannot open /dev/null");
  return file;
}

// Nothing for an empty path.
absl::StatusOr<UniqueFd> OpenOutputFile(const LogLayout& layout, const std::string& path) {
  if (path.empty()) return UniqueFd();
  return layout.OpenFile(path);
}

absl::StatusOr<Pipe> MakePipe() {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC) != 0) return ErrnoStatus("pipe");
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// argv or envp, as exec takes it. Points into the strings that it was made of.
std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> MergedEnvironment(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (changes.count(text.substr(0, text.find('='))) == 0) result.push_back(text);
  }
  for (const auto& [name, value] : changes) result.push_back(absl::StrCat(name, "=", value));
  return result;
}

// All that the child needs, made before the fork: between fork and exec nothing may be allocated.
struct Child {
  std::vector<char*> argv;
  std::vector<char*> environment;
  std::vector<int> inherited_fds;
  int stdout_fd = -1;  // -1: ours
  int stderr_fd = -1;
  int error_fd = -1;                // closed by exec, or told errno
  std::vector<unsigned long> cpus;  // a mask for the kernel; empty: our own CPUs
  std::optional<rlimit> open_files;
  pid_t parent = 0;
};

void ResetSignals() {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) ::sigaction(signal, &action, nullptr);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void RunChild(const Child& child) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // It does not fire for a parent that is dead already.
  if (::getppid() != child.parent) ::_exit(127);
  if (child.stdout_fd >= 0) ::dup2(child.stdout_fd, STDOUT_FILENO);
  if (child.stderr_fd >= 0) ::dup2(child.stderr_fd, STDERR_FILENO);
  // Closed by exec, not here: error_fd is still needed.
  ::syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 1U << 2 /* CLOSE_RANGE_CLOEXEC */);
  for (const int fd : child.inherited_fds) ::fcntl(fd, F_SETFD, 0);
  if (child.open_files.has_value()) ::setrlimit(RLIMIT_NOFILE, &*child.open_files);
  if (!child.cpus.empty() &&
      ::syscall(SYS_sched_setaffinity, 0, child.cpus.size() * sizeof(child.cpus[0]),
                child.cpus.data()) < 0) {
    constexpr char kUnbound[] = "ddprun: cannot bind a worker to its CPUs; it may use all\n";
    (void)!::write(STDERR_FILENO, kUnbound, sizeof(kUnbound) - 1);
  }
  ResetSignals();
  ::execvpe(child.argv[0], child.argv.data(), child.environment.data());
  const int error = errno;
  (void)!::write(child.error_fd, &error, sizeof(error));
  ::_exit(127);
}

// Why a file that is there does not exist for exec.
std::string WhatIsMissing(const std::string& program) {
  std::array<char, 256> head{};  // the kernel looks no further
  const UniqueFd file(::open(program.c_str(), O_RDONLY | O_CLOEXEC));
  const ssize_t size = file.valid() ? ::read(file.get(), head.data(), head.size()) : -1;
  if (size < 0) return std::strerror(ENOENT);
  std::string text(head.data(), static_cast<size_t>(size));
  if (!absl::StartsWith(text, "#!")) return "the loader that it wants is not on this machine";
  text = text.substr(2, text.find('\n') - 2);
  text.erase(0, text.find_first_not_of(" \t"));
  text = text.substr(0, text.find_first_of(" \t"));
  const bool from_windows = absl::EndsWith(text, "\r");
  if (from_windows) text.pop_back();
  return absl::StrCat(
      "its first line names the interpreter ", Printable(text),
      from_windows ? " and ends as on Windows (CR LF), which must be LF" : ", which is not there");
}

absl::Status ExecError(const std::string& program, int error) {
  const std::string text =
      absl::StrCat("cannot run ", program, ": ",
                   error == ENOENT ? WhatIsMissing(program) : std::string(std::strerror(error)));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(text);
  return absl::InternalError(text);
}

// Forks; returns the pid when exec has succeeded.
absl::StatusOr<pid_t> Start(Child child) {
  DDP_ASSIGN_OR_RETURN(Pipe error_pipe, MakePipe());
  child.error_fd = error_pipe.write.get();
  child.parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return ErrnoStatus("fork");
  if (pid == 0) RunChild(child);
  error_pipe.write.reset();
  int error = 0;
  ssize_t count = 0;
  do {
    count = ::read(error_pipe.read.get(), &error, sizeof(error));
  } while (count < 0 && errno == EINTR);
  if (count == 0) return pid;
  ::waitpid(pid, nullptr, 0);
  return ExecError(child.argv[0], error);
}

}  // namespace

// Where one output stream of a worker goes.
struct PosixProcessSpawner::Output {
  UniqueFd child_end;        // to become its descriptor 1 or 2; none: it keeps ours
  LogRouter::Stream stream;  // with a pipe: to be carried by the router
};

PosixProcessSpawner::PosixProcessSpawner(EventLoop* event_loop, LogRouter* router, Options options)
    : event_loop_(event_loop),
      router_(router),
      options_(std::move(options)),
      layout_(options_.layout) {}

absl::StatusOr<std::unique_ptr<PosixProcessSpawner>> PosixProcessSpawner::Create(
    EventLoop* event_loop, LogRouter* router, Options options) {
  std::unique_ptr<PosixProcessSpawner> spawner(
      new PosixProcessSpawner(event_loop, router, std::move(options)));
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus("signalfd");
  PosixProcessSpawner* self = spawner.get();
  DDP_RETURN_IF_ERROR(event_loop->Watch(fd.get(), EPOLLIN, [self](uint32_t) {
    signalfd_siginfo info{};
    while (::read(self->child_signals_.get(), &info, sizeof(info)) > 0) {
    }
    ReapChildren(self->Spared());
  }));
  spawner->child_signals_ = std::move(fd);
  return spawner;
}

PosixProcessSpawner::~PosixProcessSpawner() {
  for (auto& [pid, worker] : workers_) {
    event_loop_->Unwatch(worker.pidfd.get());
    ended_streams_.insert(ended_streams_.end(), worker.streams.begin(), worker.streams.end());
  }
  workers_.clear();
  KillStrays();
  if (child_signals_.valid()) event_loop_->Unwatch(child_signals_.get());
}

std::set<pid_t> PosixProcessSpawner::Spared() const {
  std::set<pid_t> spared = spared_;
  for (const auto& [pid, worker] : workers_) spared.insert(pid);
  return spared;
}

absl::StatusOr<PosixProcessSpawner::Output> PosixProcessSpawner::OpenOutput(
    const elastic::WorkerSpec& spec, Streams stream, const LogLayout::WorkerFiles& files) const {
  const OutputOptions& wanted = options_.output;
  const bool tee = (wanted.tee.Get(spec.local_rank) & stream) != 0;
  const bool redirect = (wanted.redirects.Get(spec.local_rank) & stream) != 0;
  const bool shown =
      wanted.local_ranks_filter.empty() || wanted.local_ranks_filter.count(spec.local_rank) != 0;
  Output output;
  if (tee && shown) {
    DDP_ASSIGN_OR_RETURN(Pipe pipe, MakePipe());
    DDP_ASSIGN_OR_RETURN(output.stream, MakeStream(spec, stream, files));
    output.child_end = std::move(pipe.write);
    output.stream.pipe = std::move(pipe.read);
  } else if (tee || redirect || !shown) {
    const std::string& path = stream == kStdout ? files.stdout_log : files.stderr_log;
    const bool has_file = (tee || redirect) && !path.empty();
    DDP_ASSIGN_OR_RETURN(output.child_end, has_file ? OpenOutputFile(layout_, path) : OpenNull());
  }
  return output;
}

// All but the pipe.
absl::StatusOr<LogRouter::Stream> PosixProcessSpawner::MakeStream(
    const elastic::WorkerSpec& spec, Streams stream, const LogLayout::WorkerFiles& files) const {
  const bool is_out = stream == kStdout;
  LogRouter::Stream result;
  result.file_path = is_out ? files.stdout_log : files.stderr_log;
  DDP_ASSIGN_OR_RETURN(result.file, OpenOutputFile(layout_, result.file_path));
  result.filters = is_out ? options_.output.filters_of_stdout : options_.output.filters_of_stderr;
  if (!result.filters.empty()) {
    result.filtered_path = is_out ? files.filtered_stdout : files.filtered_stderr;
    DDP_ASSIGN_OR_RETURN(result.filtered_file, OpenOutputFile(layout_, result.filtered_path));
  }
  result.prefix = ExpandTemplate(options_.output.prefix_template,
                                 {{"role_name", spec.role},
                                  {"local_rank", absl::StrCat(spec.local_rank)},
                                  {"rank", absl::StrCat(spec.rank)},
                                  {"hostname", options_.host}});
  result.to_stderr = !is_out;
  return result;
}

std::vector<unsigned long> PosixProcessSpawner::CpuMask(int local_rank) const {
  std::vector<unsigned long> mask;
  if (static_cast<size_t>(local_rank) >= options_.cpus.size()) return mask;
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  for (const int cpu : options_.cpus[static_cast<size_t>(local_rank)]) {
    const size_t word = static_cast<size_t>(cpu) / kBits;
    if (word >= mask.size()) mask.resize(word + 1, 0);
    mask[word] |= 1UL << (static_cast<size_t>(cpu) % kBits);
  }
  return mask;
}

absl::StatusOr<pid_t> PosixProcessSpawner::Spawn(const elastic::WorkerSpec& spec,
                                                 ExitCallback on_exit) {
  if (options_.doomed != nullptr && options_.doomed->load()) {
    return absl::CancelledError("ddprun is being stopped");
  }
  DDP_ASSIGN_OR_RETURN(const LogLayout::WorkerFiles files,
                       layout_.MakeWorkerFolder(spec.attempt, spec.generation, spec.local_rank));
  DDP_ASSIGN_OR_RETURN(Output out, OpenOutput(spec, kStdout, files));
  DDP_ASSIGN_OR_RETURN(Output err, OpenOutput(spec, kStderr, files));

  std::vector<std::string> argv = spec.argv;
  std::map<std::string, std::string> changes = spec.environment;
  changes[kErrorFileVariable] = files.error_file;
  std::vector<std::string> environment = MergedEnvironment(changes);
  Child child;
  child.argv = Pointers(argv);
  child.environment = Pointers(environment);
  child.inherited_fds = spec.inherited_fds;
  child.stdout_fd = out.child_end.get();
  child.stderr_fd = err.child_end.get();
  child.cpus = CpuMask(spec.local_rank);
  child.open_files = options_.open_files;
  DDP_ASSIGN_OR_RETURN(const pid_t pid, Start(std::move(child)));

  Worker worker;
  worker.error_file = files.error_file;
  worker.on_exit = std::move(on_exit);
  for (Output* output : {&out, &err}) {
    output->child_end.reset();
    if (!output->stream.pipe.valid()) continue;
    absl::StatusOr<LogRouter::StreamId> id = router_->AddStream(std::move(output->stream));
    if (!id.ok()) {
      ::kill(-pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
      return id.status();
    }
    worker.streams.push_back(*id);
  }
  DDP_RETURN_IF_ERROR(Adopt(pid, std::move(worker)));
  return pid;
}

absl::Status PosixProcessSpawner::Adopt(pid_t pid, Worker worker) {
  worker.pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  absl::Status status = worker.pidfd.valid() ? absl::OkStatus() : ErrnoStatus("pidfd_open");
  if (status.ok()) {
    status =
        event_loop_->Watch(worker.pidfd.get(), EPOLLIN, [this, pid](uint32_t) { OnExit(pid); });
  }
  if (!status.ok()) {
    ::kill(-pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return status;
  }
  workers_.emplace(pid, std::move(worker));
  return absl::OkStatus();
}

void PosixProcessSpawner::OnExit(pid_t pid) {
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG) != 0 || info.si_pid == 0) {
    return;
  }
  const auto found = workers_.find(pid);
  Worker worker = std::move(found->second);
  workers_.erase(found);
  event_loop_->Unwatch(worker.pidfd.get());
  for (const LogRouter::StreamId id : worker.streams) router_->DrainStream(id);
  ended_streams_.insert(ended_streams_.end(), worker.streams.begin(), worker.streams.end());
  elastic::ExitStatus status;
  status.error_file = std::move(worker.error_file);
  if (info.si_code == CLD_EXITED) {
    status.exit_code = info.si_status;
  } else {
    status.signal = info.si_status;
  }
  // Killed by us: no failure that the job should pay for.
  if (options_.doomed != nullptr && options_.doomed->load()) return;
  worker.on_exit(pid, std::move(status));
}

void PosixProcessSpawner::Signal(pid_t pid, int signal) {
  // The group is named after its leader and exists as long as any member does.
  ::kill(-pid, signal);
}

void PosixProcessSpawner::KillStrays() {
  if (!KillChildren(Spared(), kKillTimeout)) {
    router_->Say(absl::StrCat("some processes of the workers did not end by SIGKILL within ",
                              absl::FormatDuration(kKillTimeout)));
  }
  for (const LogRouter::StreamId id : ended_streams_) router_->CloseStream(id);
  ended_streams_.clear();
}

}  // namespace ddp::launcher

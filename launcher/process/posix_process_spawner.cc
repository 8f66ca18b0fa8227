#include "launcher/process/posix_process_spawner.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/process/child_process.h"
#include "base/process/close_on_exec.h"
#include "base/process/pidfd.h"
#include "base/status_macros.h"
#include "elastic/error_file/error_record.h"
#include "launcher/output/line_prefix.h"
#include "launcher/process/exec_error.h"

namespace ddp::launcher {
namespace {

// Pause between two passes that look for strays, unless one of them ends before.
constexpr absl::Duration kHuntPause = absl::Milliseconds(20);
// Maximum of passes in a row that find strays which end at once. A program that forks faster must
// not block the event loop.
constexpr int kMostLooks = 8;

absl::Status ErrnoStatus(const std::string& what) {
  const std::string text = absl::StrCat(what, ": ", std::strerror(errno));
  if (errno == EMFILE || errno == ENFILE || errno == EAGAIN || errno == ENOMEM) {
    return absl::ResourceExhaustedError(text);
  }
  if (errno == EPERM || errno == ENOSYS) return absl::UnimplementedError(text);
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

// Opens an output file; returns an invalid descriptor for an empty path.
absl::StatusOr<UniqueFd> OpenOutputFile(const LogLayout& layout, const std::string& path) {
  if (path.empty()) return UniqueFd();
  return layout.OpenFile(path);
}

absl::StatusOr<Pipe> MakePipe() {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC) != 0) return ErrnoStatus("pipe");
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
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

// Everything that BecomeWorker() needs, made before the fork.
struct WorkerSetup {
  std::vector<char*> argv;
  std::vector<char*> environment;
  std::vector<int> inherited_fds;
  int stdout_fd = -1;  // -1: same as this process
  int stderr_fd = -1;
  std::vector<unsigned long> cpus;  // mask for the kernel; empty: this process's CPUs
  std::optional<rlimit> open_files;
};

// Leaves ignored what the user ignored before ddprun (nohup, `trap '' XFSZ`). Some signals are
// always reset: ddprun ignores SIGPIPE itself, a worker that ignores SIGCHLD could not wait for its
// children, ddprun stops workers by SIGTERM, and shells ignore SIGINT and SIGQUIT for every job in
// the background.
void ResetSignals() {
  struct sigaction action {};
  for (int signal = 1; signal < NSIG; ++signal) {
    const bool always = signal == SIGPIPE || signal == SIGCHLD || signal == SIGTERM ||
                        signal == SIGINT || signal == SIGQUIT;
    if (!always && ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) {
      continue;
    }
    action = {};
    action.sa_handler = SIG_DFL;
    ::sigaction(signal, &action, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

// Runs in the child, between fork and exec: makes system calls only. Returns errno when the program
// cannot be executed.
int BecomeWorker(const WorkerSetup& setup) {
  ::setsid();
  if (setup.stdout_fd >= 0) ::dup2(setup.stdout_fd, STDOUT_FILENO);
  if (setup.stderr_fd >= 0) ::dup2(setup.stderr_fd, STDERR_FILENO);
  const int not_closed = SetCloseOnExecFrom(STDERR_FILENO + 1);
  if (not_closed != 0) return not_closed;
  for (const int fd : setup.inherited_fds) ::fcntl(fd, F_SETFD, 0);
  if (setup.open_files.has_value()) ::setrlimit(RLIMIT_NOFILE, &*setup.open_files);
  if (!setup.cpus.empty() &&
      ::syscall(SYS_sched_setaffinity, 0, setup.cpus.size() * sizeof(setup.cpus[0]),
                setup.cpus.data()) < 0) {
    constexpr char kUnbound[] = "ddprun: cannot bind a worker to its CPUs; it may use all\n";
    (void)!::write(STDERR_FILENO, kUnbound, sizeof(kUnbound) - 1);
  }
  ResetSignals();
  // execvpe() would give a file that is no program to /bin/sh.
  ::execve(setup.argv[0], setup.argv.data(), setup.environment.data());
  return errno;
}

// Kills a process that may not have made its session yet.
void KillStarting(pid_t pid) {
  ::kill(pid, SIGKILL);
  ::kill(-pid, SIGKILL);
}

}  // namespace

// Destination of one output stream of a worker.
struct PosixProcessSpawner::Output {
  UniqueFd child_end;        // the worker's descriptor 1 or 2; invalid: same as ours
  LogRouter::Stream stream;  // stream for the router, if its pipe is valid
};

// Output destinations and error file of one worker. Made on the thread for files.
struct PosixProcessSpawner::Outputs {
  absl::Status status;
  LogLayout::WorkerFiles files;
  Output out;
  Output err;
};

// Configuration of all output. Shared with the thread for files, and used only there.
struct PosixProcessSpawner::OutputPlaces {
  OutputOptions wanted;
  LogLayout layout;
  std::string host;

  absl::Status Open(const elastic::WorkerSpec& spec, Outputs& outputs);
  absl::StatusOr<Output> OpenOutput(const elastic::WorkerSpec& spec, Streams stream,
                                    const LogLayout::WorkerFiles& files) const;
  absl::StatusOr<LogRouter::Stream> MakeStream(const elastic::WorkerSpec& spec, Streams stream,
                                               const LogLayout::WorkerFiles& files) const;
};

PosixProcessSpawner::PosixProcessSpawner(EventLoop* event_loop, LogRouter* router, Options options)
    : event_loop_(event_loop),
      router_(router),
      options_(std::move(options)),
      places_(std::make_shared<OutputPlaces>(
          OutputPlaces{options_.output, options_.layout, options_.host})) {}

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
    if (self->on_strays_gone_) self->Hunt();
  }));
  spawner->child_signals_ = std::move(fd);
  return spawner;
}

PosixProcessSpawner::~PosixProcessSpawner() {
  CancelStart();
  for (auto& [pid, worker] : workers_) {
    event_loop_->Unwatch(worker.pidfd.get());
    ended_streams_.insert(ended_streams_.end(), worker.streams.begin(), worker.streams.end());
  }
  workers_.clear();
  AwaitStrays();
  if (child_signals_.valid()) event_loop_->Unwatch(child_signals_.get());
}

std::set<pid_t> PosixProcessSpawner::Spared() const {
  std::set<pid_t> spared = spared_;
  for (const auto& [pid, worker] : workers_) spared.insert(pid);
  if (starting_.has_value()) spared.insert(starting_->pid);
  return spared;
}

absl::Status PosixProcessSpawner::OutputPlaces::Open(const elastic::WorkerSpec& spec,
                                                     Outputs& outputs) {
  DDP_ASSIGN_OR_RETURN(outputs.files,
                       layout.MakeWorkerFolder(spec.attempt, spec.generation, spec.local_rank));
  DDP_ASSIGN_OR_RETURN(outputs.out, OpenOutput(spec, kStdout, outputs.files));
  DDP_ASSIGN_OR_RETURN(outputs.err, OpenOutput(spec, kStderr, outputs.files));
  return absl::OkStatus();
}

absl::StatusOr<PosixProcessSpawner::Output> PosixProcessSpawner::OutputPlaces::OpenOutput(
    const elastic::WorkerSpec& spec, Streams stream, const LogLayout::WorkerFiles& files) const {
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
    DDP_ASSIGN_OR_RETURN(output.child_end, has_file ? OpenOutputFile(layout, path) : OpenNull());
  }
  return output;
}

// Makes everything of the stream except the pipe.
absl::StatusOr<LogRouter::Stream> PosixProcessSpawner::OutputPlaces::MakeStream(
    const elastic::WorkerSpec& spec, Streams stream, const LogLayout::WorkerFiles& files) const {
  const bool is_out = stream == kStdout;
  LogRouter::Stream result;
  result.file_path = is_out ? files.stdout_log : files.stderr_log;
  DDP_ASSIGN_OR_RETURN(result.file, OpenOutputFile(layout, result.file_path));
  result.filters = is_out ? wanted.filters_of_stdout : wanted.filters_of_stderr;
  if (!result.filters.empty()) {
    result.filtered_path = is_out ? files.filtered_stdout : files.filtered_stderr;
    DDP_ASSIGN_OR_RETURN(result.filtered_file, OpenOutputFile(layout, result.filtered_path));
  }
  result.prefix =
      ExpandTemplate(wanted.prefix_template, {{"role_name", spec.role},
                                              {"local_rank", absl::StrCat(spec.local_rank)},
                                              {"rank", absl::StrCat(spec.rank)},
                                              {"hostname", host}});
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

void PosixProcessSpawner::Spawn(const elastic::WorkerSpec& spec, StartCallback on_start,
                                ExitCallback on_exit) {
  EndHunt();
  if (options_.doomed != nullptr && options_.doomed->load()) {
    return on_start(absl::CancelledError("ddprun is being stopped"));
  }
  const auto outputs = std::make_shared<Outputs>();
  starting_.emplace(Starting{.spec = spec,
                             .on_start = std::move(on_start),
                             .on_exit = std::move(on_exit),
                             .outputs = outputs});
  const auto open = [places = places_, spec, outputs] {
    outputs->status = places->Open(spec, *outputs);
  };
  if (options_.files == nullptr) {
    open();
    return StartProcess();
  }
  options_.files->Run(open, [this, wanted = std::weak_ptr<Outputs>(outputs)] {
    // The start was cancelled meanwhile, so its files are closed; or this spawner is destroyed.
    if (!wanted.expired()) StartProcess();
  });
}

void PosixProcessSpawner::StartProcess() {
  Starting& starting = *starting_;
  Outputs& outputs = *starting.outputs;
  if (!outputs.status.ok()) return EndStart(outputs.status);
  if (options_.doomed != nullptr && options_.doomed->load()) {
    return EndStart(absl::CancelledError("ddprun is being stopped"));
  }
  std::vector<std::string> argv = starting.spec.argv;
  std::map<std::string, std::string> changes = starting.spec.environment;
  changes[elastic::kErrorFileVariable] = outputs.files.error_file;
  std::vector<std::string> environment = MergedEnvironment(changes);
  WorkerSetup setup;
  setup.argv = ExecPointers(argv);
  setup.environment = ExecPointers(environment);
  setup.inherited_fds = starting.spec.inherited_fds;
  setup.stdout_fd = outputs.out.child_end.get();
  setup.stderr_fd = outputs.err.child_end.get();
  setup.cpus = CpuMask(starting.spec.local_rank);
  setup.open_files = options_.open_files;
  ChildProcess child = StartChild([&setup] { return BecomeWorker(setup); });
  if (child.pid < 0) return EndStart(ErrnoStatus(child.failed_call));
  outputs.out.child_end.reset();
  outputs.err.child_end.reset();
  starting.pid = child.pid;
  starting.exec_error = std::move(child.exec_error);
  const absl::Status watched =
      event_loop_->Watch(starting.exec_error.get(), EPOLLIN, [this](uint32_t) { OnExecEnd(); });
  if (watched.ok()) return;
  KillStarting(starting.pid);
  EndStart(watched);
}

void PosixProcessSpawner::OnExecEnd() {
  Starting& starting = *starting_;
  const int error = ReadExecError(starting.exec_error);
  event_loop_->Unwatch(starting.exec_error.get());
  const pid_t pid = starting.pid;
  if (error != 0) {
    ::waitpid(pid, nullptr, 0);  // the child is in _exit()
    return EndStart(ExecError(starting.spec.argv[0], error));
  }
  // Exec has succeeded. If the process was killed before exec, its pidfd reports the end.
  Worker worker;
  worker.error_file = starting.outputs->files.error_file;
  worker.on_exit = std::move(starting.on_exit);
  absl::Status status = AddStreams(*starting.outputs, worker);
  if (status.ok()) status = Adopt(pid, std::move(worker));
  if (!status.ok()) {
    KillStarting(pid);
    return EndStart(status);
  }
  EndStart(pid);
}

// The callback may begin the next start, so `starting_` is reset first.
void PosixProcessSpawner::EndStart(absl::StatusOr<pid_t> pid) {
  const StartCallback on_start = std::move(starting_->on_start);
  starting_.reset();
  on_start(std::move(pid));
}

void PosixProcessSpawner::CancelStart() {
  if (!starting_.has_value()) return;
  if (starting_->pid > 0) {
    event_loop_->Unwatch(starting_->exec_error.get());
    KillStarting(starting_->pid);  // a stray from now on
  }
  starting_.reset();
}

absl::Status PosixProcessSpawner::AddStreams(Outputs& outputs, Worker& worker) {
  for (Output* output : {&outputs.out, &outputs.err}) {
    if (!output->stream.pipe.valid()) continue;
    const absl::StatusOr<LogRouter::StreamId> id = router_->AddStream(std::move(output->stream));
    if (!id.ok()) {
      for (const LogRouter::StreamId added : worker.streams) router_->CloseStream(added);
      return id.status();
    }
    worker.streams.push_back(*id);
  }
  return absl::OkStatus();
}

absl::Status PosixProcessSpawner::Adopt(pid_t pid, Worker worker) {
  worker.pidfd = OpenPidfd(pid);
  absl::Status status = worker.pidfd.valid() ? absl::OkStatus() : ErrnoStatus("pidfd_open");
  if (status.ok()) {
    status =
        event_loop_->Watch(worker.pidfd.get(), EPOLLIN, [this, pid](uint32_t) { OnExit(pid); });
  }
  if (!status.ok()) {
    for (const LogRouter::StreamId id : worker.streams) router_->CloseStream(id);
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
  // The watcher killed the worker: the job must not be charged with a failure.
  if (options_.doomed != nullptr && options_.doomed->load()) return;
  worker.on_exit(pid, std::move(status));
}

void PosixProcessSpawner::Signal(pid_t pid, int signal) {
  // The process group has its leader's number and exists as long as any member does.
  ::kill(-pid, signal);
}

void PosixProcessSpawner::KillStrays(std::function<void()> on_gone) {
  EndHunt();
  on_strays_gone_ = std::move(on_gone);
  Hunt();
}

void PosixProcessSpawner::Hunt() {
  event_loop_->CancelTimer(std::exchange(hunt_timer_, 0));
  int empty_looks = 0;
  KillPass pass;
  for (int look = 0; look < kMostLooks && empty_looks < 2 && pass.left.empty(); ++look) {
    pass = options_.kill_children(Spared());
    empty_looks = pass.found_any ? 0 : empty_looks + 1;
  }
  if (empty_looks < 2) {
    hunt_timer_ = event_loop_->AddTimer(kHuntPause, [this] {
      hunt_timer_ = 0;
      Hunt();
    });
    return;
  }
  const std::function<void()> on_gone = std::exchange(on_strays_gone_, nullptr);
  CloseEndedStreams();
  on_gone();
}

void PosixProcessSpawner::EndHunt() {
  event_loop_->CancelTimer(std::exchange(hunt_timer_, 0));
  on_strays_gone_ = nullptr;
  CloseEndedStreams();
}

void PosixProcessSpawner::CloseEndedStreams() {
  for (const LogRouter::StreamId id : std::exchange(ended_streams_, {})) router_->CloseStream(id);
}

void PosixProcessSpawner::AwaitStrays() {
  event_loop_->CancelTimer(std::exchange(hunt_timer_, 0));
  on_strays_gone_ = nullptr;
  if (!KillChildren(Spared(), options_.kill_timeout)) {
    router_->Say(absl::StrCat("some processes of the workers did not end by SIGKILL within ",
                              absl::FormatDuration(options_.kill_timeout), " (--kill-timeout)"));
  }
  CloseEndedStreams();
}

}  // namespace ddp::launcher

#include "store/redis_server/private_redis_server.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/process/child_process.h"
#include "base/process/close_on_exec.h"
#include "base/process/path_search.h"
#include "base/process/pidfd.h"
#include "base/status_macros.h"
#include "store/redis/redis_connection.h"

namespace ddp::store {
namespace {

constexpr char kSocketName[] = "redis.sock";
constexpr char kConfigName[] = "redis.conf";
constexpr char kLogName[] = "redis.log";
constexpr char kDirectoryTemplate[] = "ddp-redis-XXXXXX";
constexpr size_t kMaxSocketPath = sizeof(sockaddr_un::sun_path) - 1;
constexpr size_t kLogTailBytes = 2000;

absl::Status SystemError(const std::string& what) {
  const int error_number = errno;
  return absl::ErrnoToStatus(error_number, what);
}

std::string Join(const std::string& directory, const std::string& name) {
  return absl::StrCat(directory, "/", name);
}

bool FitsASocket(const std::string& directory) {
  return Join(directory, kSocketName).size() <= kMaxSocketPath;
}

// Returns the parent of new folders: TMPDIR, or /tmp where a socket's path would be too long.
std::string TemporaryRoot() {
  const char* root = getenv("TMPDIR");
  if (root != nullptr && root[0] == '/' && FitsASocket(Join(root, kDirectoryTemplate))) return root;
  return "/tmp";
}

absl::StatusOr<std::string> MakeDirectory() {
  std::string path = Join(TemporaryRoot(), kDirectoryTemplate);
  if (mkdtemp(path.data()) == nullptr) return SystemError(absl::StrCat("making the folder ", path));
  return path;
}

absl::Status CheckDirectory(const std::string& directory) {
  if (!FitsASocket(directory)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the path of the socket ", Join(directory, kSocketName), " has more than ",
                     kMaxSocketPath, " bytes: choose a shorter folder"));
  }
  struct stat info {};
  if (lstat(directory.c_str(), &info) != 0) return SystemError(absl::StrCat("folder ", directory));
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory, " must be a folder of this user with mode 0700"));
  }
  if (lstat(Join(directory, kSocketName).c_str(), &info) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("socket in use: ", Join(directory, kSocketName), " exists already"));
  }
  return absl::OkStatus();
}

// Returns an absolute path, because the child changes its folder before exec. Symbolic links stay:
// a program may depend on the name by which it was started.
std::string Absolute(const std::string& path) {
  if (path[0] == '/') return path;
  char* const here = getcwd(nullptr, 0);
  const std::string absolute = Join(here == nullptr ? "." : here, path);
  free(here);
  return absolute;
}

std::string OwnFolder() {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  const std::string own(path, std::max<ssize_t>(size, 0));
  return own.empty() ? "/usr/bin/" : own.substr(0, own.rfind('/') + 1);  // empty: no /proc
}

// A bundle has the server that ddprun was tested with beside it; else it is on the PATH.
absl::StatusOr<std::string> FindProgram(const std::string& name) {
  std::optional<std::string> found;
  if (name.find('/') == std::string::npos) {
    const char* path = getenv("PATH");
    const std::string beside = OwnFolder() + name;
    if (IsExecutableFile(beside)) return beside;
    found = SearchPath(name, path == nullptr ? "/usr/bin" : path);
  } else if (IsExecutableFile(name)) {
    found = name;
  }
  if (found.has_value()) return Absolute(*found);
  return absl::NotFoundError(absl::StrCat(
      name,
      " not found: install redis-server (Debian: apt-get install redis-server), or give the "
      "endpoint of a running Redis"));
}

// Runs in the child, between fork and exec: makes system calls only and allocates nothing. Returns
// errno when the program cannot be executed.
int BecomeServer(const char* program, const char* directory, const char* config, int log_fd,
                 int null_fd) {
  setsid();
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGCHLD}) signal(number, SIG_DFL);
  if (dup2(null_fd, STDIN_FILENO) < 0 || dup2(log_fd, STDOUT_FILENO) < 0 ||
      dup2(log_fd, STDERR_FILENO) < 0 || chdir(directory) != 0) {
    return errno;
  }
  // The server must not inherit the caller's descriptors.
  const int not_closed = SetCloseOnExecFrom(STDERR_FILENO + 1);
  if (not_closed != 0) return not_closed;
  char* const argv[] = {const_cast<char*>(program), const_cast<char*>(config), nullptr};
  execv(program, argv);
  return errno;
}

// Makes the start-up user, which loads the scripts and opens the port. Its name and its password
// are random, so no other client knows them.
absl::StatusOr<RedisEndpoint> MakeStarter(const RedisEndpoint& endpoint) {
  std::string bytes(32, '\0');
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return SystemError("getrandom");
  }
  RedisEndpoint starter = endpoint;
  starter.user = absl::StrCat("ddp-start-", absl::BytesToHexString(bytes.substr(0, 8)));
  starter.password = absl::BytesToHexString(bytes.substr(8));
  return starter;
}

std::string RulesOf(const RedisEndpoint& starter) {
  return absl::StrCat("user ", starter.user, " on >", starter.password,
                      " resetkeys resetchannels -@all +auth +ping +client|setname +script|load "
                      "+config|set +acl|setuser");
}

}  // namespace

PrivateRedisServer::PrivateRedisServer(std::string directory, bool owns_directory)
    : directory_(std::move(directory)), owns_directory_(owns_directory) {
  endpoint_.unix_path = Join(directory_, kSocketName);
}

PrivateRedisServer::~PrivateRedisServer() { Stop(); }

absl::StatusOr<std::unique_ptr<PrivateRedisServer>> PrivateRedisServer::Start(
    const Options& options) {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<PrivateRedisServer> server, Prepare(options));
  DDP_RETURN_IF_ERROR(server->Launch());
  DDP_RETURN_IF_ERROR(server->AwaitAnswer());
  return server;
}

absl::StatusOr<std::unique_ptr<PrivateRedisServer>> PrivateRedisServer::Prepare(
    const Options& options) {
  DDP_ASSIGN_OR_RETURN(const std::string program, FindProgram(options.redis_server));
  std::string directory = options.directory;
  if (directory.empty()) {
    DDP_ASSIGN_OR_RETURN(directory, MakeDirectory());
  } else {
    DDP_RETURN_IF_ERROR(CheckDirectory(directory));
  }
  std::unique_ptr<PrivateRedisServer> server(
      new PrivateRedisServer(directory, options.directory.empty()));
  server->options_ = options;
  server->program_ = program;
  if (options.port != 0 || !options.scripts.empty()) {
    DDP_ASSIGN_OR_RETURN(server->starter_, MakeStarter(server->endpoint_));
  }
  DDP_RETURN_IF_ERROR(server->WriteConfig());
  return server;
}

absl::Status PrivateRedisServer::WriteConfig() const {
  // The server runs in the folder and its paths are relative, so no path needs quoting.
  std::vector<std::string> lines = {
      "port 0",
      absl::StrCat("unixsocket ", kSocketName),
      "unixsocketperm 700",
      "daemonize no",
      "save \"\"",
      "appendonly no",
      "maxmemory-policy noeviction",
      "protected-mode no",
      "logfile \"\"",
  };
  lines.insert(lines.end(), options_.extra_config.begin(), options_.extra_config.end());
  if (starter_.has_value()) lines.push_back(RulesOf(*starter_));
  const std::string text = absl::StrCat(absl::StrJoin(lines, "\n"), "\n");
  const std::string path = Join(directory_, kConfigName);
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd.valid()) return SystemError(absl::StrCat("writing ", path));
  if (write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return SystemError(absl::StrCat("writing ", path));
  }
  return absl::OkStatus();
}

absl::Status PrivateRedisServer::Launch() {
  const std::string log = Join(directory_, kLogName);
  const UniqueFd log_fd(
      open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!log_fd.valid()) return SystemError(absl::StrCat("writing ", log));
  const UniqueFd null_fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null_fd.valid()) return SystemError("starting redis-server");
  ChildProcess child = StartChild([&] {
    return BecomeServer(program_.c_str(), directory_.c_str(), kConfigName, log_fd.get(),
                        null_fd.get());
  });
  pid_ = child.pid;
  if (pid_ < 0) return SystemError(absl::StrCat("starting redis-server: ", child.failed_call));
  exec_error_ = std::move(child.exec_error);
  pidfd_ = OpenPidfd(pid_);
  return pidfd_.valid() ? absl::OkStatus() : SystemError("starting redis-server: pidfd_open");
}

absl::Status PrivateRedisServer::AwaitExec(absl::Time deadline) {
  const MonotonicClock clock;
  pollfd entry{.fd = exec_error_.get(), .events = POLLIN, .revents = 0};
  int ready = 0;
  do {
    const absl::Duration left = std::max(deadline - clock.Now(), absl::ZeroDuration());
    ready = poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(left)));
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) {
    return absl::DeadlineExceededError(absl::StrCat("cannot start ", program_, " within ",
                                                    absl::FormatDuration(options_.start_timeout)));
  }
  const int error_number = ReadExecError(exec_error_);
  if (error_number == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(error_number, absl::StrCat("cannot start ", program_));
}

absl::Status PrivateRedisServer::AwaitAnswer() {
  const absl::Time deadline = MonotonicClock().Now() + options_.start_timeout;
  DDP_RETURN_IF_ERROR(AwaitExec(deadline));
  DDP_RETURN_IF_ERROR(AwaitConnection(deadline));
  return starter_.has_value() ? Open() : absl::OkStatus();
}

absl::Status PrivateRedisServer::AwaitConnection(absl::Time deadline) {
  const MonotonicClock clock;
  absl::Duration pause = absl::Milliseconds(1);
  RedisConnection::Options options;
  options.total_timeout = absl::ZeroDuration();
  while (true) {
    options.connect_timeout = std::max(deadline - clock.Now(), absl::Milliseconds(1));
    const absl::Status connected = RedisConnection::Connect(endpoint_, options).status();
    // A server that demands a password (extra_config) has answered.
    if (connected.ok() || absl::IsUnauthenticated(connected)) return absl::OkStatus();
    if (clock.Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("redis-server did not answer within ",
                                                      absl::FormatDuration(options_.start_timeout),
                                                      ": ", connected.message(), LogTail()));
    }
    pollfd entry{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    if (poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(pause))) > 0) {
      return absl::UnavailableError(absl::StrCat("redis-server ended at its start", LogTail()));
    }
    pause = std::min(pause * 2, absl::Milliseconds(8));
  }
}

// Loads the scripts, then opens the port, then disables the start-up user.
absl::Status PrivateRedisServer::Open() const {
  RedisConnection::Options calls;
  calls.connect_timeout = calls.command_timeout = options_.start_timeout;
  calls.total_timeout = absl::ZeroDuration();
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<RedisConnection> connection,
                       RedisConnection::Connect(*starter_, calls));
  std::vector<std::vector<std::string>> loads;
  for (const RedisScript& script : options_.scripts) {
    loads.push_back({"SCRIPT", "LOAD", script.source()});
  }
  if (!loads.empty()) DDP_RETURN_IF_ERROR(connection->Pipeline(loads).status());
  if (options_.port != 0) {
    const absl::Status opened =
        connection->Command({"CONFIG", "SET", "port", absl::StrCat(options_.port)}).status();
    if (!opened.ok()) {
      return absl::UnavailableError(absl::StrCat("redis-server cannot listen on port ",
                                                 options_.port, ": ", opened.message(), LogTail()));
    }
  }
  return connection->Command({"ACL", "SETUSER", starter_->user, "reset"}).status();
}

// Returns the end of the server's output as one line, to follow a message.
std::string PrivateRedisServer::LogTail() const {
  const UniqueFd fd(open(Join(directory_, kLogName).c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!fd.valid() || fstat(fd.get(), &info) != 0) return "";
  std::string tail(kLogTailBytes, '\0');
  const off_t from = std::max<off_t>(0, info.st_size - static_cast<off_t>(kLogTailBytes));
  const ssize_t count = pread(fd.get(), tail.data(), tail.size(), from);
  tail.resize(std::max<ssize_t>(0, count));
  const std::vector<std::string> lines = absl::StrSplit(tail, '\n', absl::SkipWhitespace());
  if (lines.empty()) return ", printing nothing";
  return absl::StrCat("; it printed: ", absl::StrJoin(lines, " | "));
}

void PrivateRedisServer::Kill() { (void)SignalPidfd(pidfd_.get(), pid_, SIGKILL); }

void PrivateRedisServer::Stop() {
  // The second call does nothing: by then the folder may hold the files of another server.
  if (std::exchange(stopped_, true)) return;
  if (pid_ > 0) {
    // SIGKILL: the server has no data to save. The pidfd cannot hit another process, even if other
    // code has reaped the child.
    const bool will_end =
        (pidfd_.valid() ? SignalPidfd(pidfd_.get(), pid_, SIGKILL) : kill(pid_, SIGKILL) == 0) ||
        errno == ESRCH;
    while (waitpid(pid_, nullptr, will_end ? 0 : WNOHANG) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    pidfd_.reset();
  }
  for (const char* name : {kSocketName, kConfigName, kLogName}) {
    unlink(Join(directory_, name).c_str());
  }
  if (owns_directory_) rmdir(directory_.c_str());
}

}  // namespace ddp::store

#include "elastic/worker/fatal_signal.h"

#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "base/death_notice.h"
#include "elastic/error_file/error_record.h"
#include "elastic/worker/first_error.h"

namespace ddp::elastic {
namespace {

// OnFatalSignal may interrupt the process in any state. The code that it calls therefore uses only
// functions that signal-safety(7) allows, and only memory that was allocated before.

struct FatalSignal {
  int number;
  const char* name;
};
constexpr std::array<FatalSignal, 6> kFatalSignals = {{{SIGSEGV, "SIGSEGV"},
                                                       {SIGBUS, "SIGBUS"},
                                                       {SIGFPE, "SIGFPE"},
                                                       {SIGILL, "SIGILL"},
                                                       {SIGABRT, "SIGABRT"},
                                                       {SIGSYS, "SIGSYS"}}};

constexpr int kMaxFrames = 64;
constexpr unsigned kSecondsForTheStack = 2;

// Holds a text in a fixed buffer and cuts off the rest.
template <size_t kSize>
class Text {
 public:
  Text& Add(const char* text) {
    for (; *text != '\0' && size_ < kSize; ++text) bytes_[size_++] = *text;
    return *this;
  }
  Text& AddNumber(uint64_t value, unsigned base = 10) {
    char digits[20];
    int count = 0;
    do {
      digits[count++] = "0123456789abcdef"[value % base];
      value /= base;
    } while (value != 0);
    while (count > 0 && size_ < kSize) bytes_[size_++] = digits[--count];
    return *this;
  }
  Text& AddAddress(uint64_t value) { return Add("0x").AddNumber(value, 16); }
  // Adds a part of a JSON string. Each character that JSON would escape becomes '?'.
  Text& AddQuotable(const char* text) {
    for (; *text != '\0' && size_ < kSize; ++text) {
      const auto byte = static_cast<unsigned char>(*text);
      const bool plain = byte >= 0x20 && byte < 0x7f && byte != '"' && byte != '\\';
      bytes_[size_++] = plain ? *text : '?';
    }
    return *this;
  }
  void Clear() { size_ = 0; }

  // Returns true when the whole text was written.
  bool WriteTo(int fd) const {
    size_t written = 0;
    while (written < size_) {
      const ssize_t result = write(fd, bytes_ + written, size_ - written);
      if (result < 0 && errno == EINTR) continue;
      if (result <= 0) return false;
      written += static_cast<size_t>(result);
    }
    return true;
  }

  // Returns the text with a terminating zero.
  const char* c_str() {
    bytes_[std::min(size_, kSize - 1)] = '\0';
    return bytes_;
  }

 private:
  size_t size_ = 0;
  char bytes_[kSize];
};

struct Frame {
  uint64_t address = 0;
  uint64_t offset = 0;  // within `file`, where there is one
  char file[256] = {};
};

// The memory of the handler, allocated at load. Process-wide, as signal handlers are.
struct Prepared {
  pid_t pid = 0;
  Text<4096> path;  // empty: no error file is wanted
  Text<4096> beside;
  bool has_path = false;
  std::array<struct sigaction, kFatalSignals.size()> previous{};
  Text<512> message;
  Text<64 * 1024> json;
  std::array<Frame, kMaxFrames> frames;
  int frame_count = 0;
};
Prepared prepared;
std::atomic<bool> is_installed{false};

size_t IndexOf(int signal) {
  size_t i = 0;
  while (i + 1 < kFatalSignals.size() && kFatalSignals[i].number != signal) ++i;
  return i;
}

bool CameFromTheKernel(const siginfo_t& info) { return info.si_code > 0; }

// Adds the cause of the signal: its sender, or the faulting address.
void AddCause(const siginfo_t& info, Text<512>* text) {
  if (!CameFromTheKernel(info)) {
    if (info.si_pid == getpid()) {
      text->Add(info.si_signo == SIGABRT ? ": the program aborted" : ": raised by the program");
    } else {
      text->Add(": sent by PID ").AddNumber(static_cast<uint64_t>(info.si_pid));
    }
    return;
  }
  const auto address = reinterpret_cast<uint64_t>(info.si_addr);
  switch (info.si_signo) {
    case SIGSEGV:
      if (info.si_code == SEGV_MAPERR) {
        text->Add(": no memory at address ").AddAddress(address);
      } else if (info.si_code == SEGV_ACCERR) {
        text->Add(": no permission at address ").AddAddress(address);
      } else {
        text->Add(": a wrong address");  // not canonical: the processor does not report it
      }
      return;
    case SIGBUS:
      text->Add(": bus error at address ").AddAddress(address);
      return;
    case SIGFPE:
      text->Add(info.si_code == FPE_INTDIV ? ": division by zero" : ": arithmetic error");
      text->Add(" at ").AddAddress(address);
      return;
    case SIGILL:
      text->Add(": illegal instruction at ").AddAddress(address);
      return;
    case SIGSYS:
      text->Add(": forbidden system call ").AddNumber(static_cast<uint64_t>(info.si_syscall));
      return;
    default:
      return;
  }
}

// Writes the error file in the form of FormatErrorRecord(): the whole file or nothing.
void WriteFile() {
  prepared.json.Clear();
  prepared.json.Add(R"({"message":{"message":")").AddQuotable(prepared.message.c_str());
  prepared.json.Add(R"(","extraInfo":{"py_callstack":")");
  // torchrun shows a call stack that is not empty in place of the message.
  if (prepared.frame_count > 0) prepared.json.AddQuotable(prepared.message.c_str()).Add("\\n");
  for (int i = 0; i < prepared.frame_count; ++i) {
    const Frame& frame = prepared.frames[static_cast<size_t>(i)];
    prepared.json.Add("#").AddNumber(static_cast<uint64_t>(i)).Add(" ");
    if (frame.file[0] != '\0') {
      prepared.json.AddQuotable(frame.file).Add("+").AddAddress(frame.offset).Add("\\n");
    } else {
      prepared.json.AddAddress(frame.address).Add("\\n");
    }
  }
  prepared.json.Add(R"(","timestamp":")").AddNumber(static_cast<uint64_t>(time(nullptr)));
  prepared.json.Add(R"("}}})");
  const int fd = open(prepared.beside.c_str(),
                      O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0) return;
  const bool whole = prepared.json.WriteTo(fd);
  close(fd);
  if (!whole || rename(prepared.beside.c_str(), prepared.path.c_str()) != 0) {
    unlink(prepared.beside.c_str());
  }
}

// Finds the file of each frame's address in /proc/self/maps, which a signal handler may read.
class MapsReader {
 public:
  void Run() {
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    char chunk[1024];
    for (;;) {
      const ssize_t count = read(fd, chunk, sizeof(chunk));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      for (ssize_t i = 0; i < count; ++i) Take(chunk[i]);
    }
    close(fd);
  }

 private:
  void Take(char byte) {
    if (byte != '\n') {
      if (size_ < sizeof(line_) - 1) line_[size_++] = byte;
      return;
    }
    line_[size_] = '\0';
    TakeLine();
    size_ = 0;
  }

  // "7f00-7f10 r-xp 00001000 08:01 1234   /usr/lib/libm.so.6"
  void TakeLine() {
    char* rest = nullptr;
    const uint64_t begin = ParseHex(line_, &rest);
    if (*rest != '-') return;
    const uint64_t end = ParseHex(rest + 1, &rest);
    while (*rest == ' ') ++rest;
    while (*rest != ' ' && *rest != '\0') ++rest;  // permissions
    while (*rest == ' ') ++rest;
    const uint64_t offset = ParseHex(rest, &rest);
    const char* path = std::strchr(rest, '/');
    if (path == nullptr) return;
    // The pieces of a mapped file follow each other. The piece of offset 0 is the load address.
    if (offset == 0) base_ = begin;
    for (int i = 0; i < prepared.frame_count; ++i) {
      Frame& frame = prepared.frames[static_cast<size_t>(i)];
      if (frame.address < begin || frame.address >= end) continue;
      frame.offset = frame.address - base_;
      std::strncpy(frame.file, path, sizeof(frame.file) - 1);
    }
  }

  static uint64_t ParseHex(char* text, char** rest) {
    uint64_t value = 0;
    for (;; ++text) {
      if (*text >= '0' && *text <= '9') {
        value = value * 16 + static_cast<uint64_t>(*text - '0');
      } else if (*text >= 'a' && *text <= 'f') {
        value = value * 16 + static_cast<uint64_t>(*text - 'a' + 10);
      } else {
        break;
      }
    }
    *rest = text;
    return value;
  }

  uint64_t base_ = 0;
  size_t size_ = 0;
  char line_[512];
};

// Sets the handler of `signal`, and unblocks the signal in the calling thread.
void SetHandlerAndUnblock(int signal, void (*handler)(int), int flags) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigaction(signal, &action, nullptr);
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, signal);
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
}

void EndBy(int signal) {
  SetHandlerAndUnblock(signal, SIG_DFL, /*flags=*/0);
  raise(signal);
  _exit(128 + signal);
}

std::atomic<int> signal_in_hand{0};

extern "C" void OnStackTakesTooLong(int /*signal*/) { EndBy(signal_in_hand.load()); }

// Records the frames of the calling thread. Walking a broken stack may fault, which ends the
// process by SIGSEGV at once, or may never end, which SIGALRM cuts short.
void LookAtTheStack(int signal) {
  signal_in_hand.store(signal);
  SetHandlerAndUnblock(SIGALRM, &OnStackTakesTooLong, SA_ONSTACK);
  alarm(kSecondsForTheStack);

  void* addresses[kMaxFrames];
  const int count = backtrace(addresses, kMaxFrames);
  prepared.frame_count = count;
  for (int i = 0; i < count; ++i) {
    prepared.frames[static_cast<size_t>(i)].address = reinterpret_cast<uint64_t>(addresses[i]);
  }
  MapsReader().Run();
  alarm(0);
}

// Returns true when nothing but the default action follows: the signal then ends the process.
bool EndsTheProcess(int signal) { return prepared.previous[IndexOf(signal)].sa_handler == SIG_DFL; }

void Report(int signal, const siginfo_t& info) {
  prepared.message.Clear();
  prepared.message.Add("Signal ").AddNumber(static_cast<uint64_t>(signal)).Add(" (");
  prepared.message.Add(kFatalSignals[IndexOf(signal)].name).Add(") received by PID ");
  prepared.message.AddNumber(static_cast<uint64_t>(getpid()));
  AddCause(info, &prepared.message);
  prepared.message.WriteTo(STDERR_FILENO);
  (void)!write(STDERR_FILENO, "\n", 1);
  if (prepared.has_path) WriteFile();
  // After the message is on disk: the errors of the peers are later than the cause.
  if (EndsTheProcess(signal)) GiveDeathNotices();
  if (!prepared.has_path) return;
  LookAtTheStack(signal);
  WriteFile();
}

extern "C" void OnFatalSignal(int signal, siginfo_t* info, void* /*context*/) {
  const int saved_errno = errno;
  if (getpid() == prepared.pid) {
    if (ClaimFirstError()) {
      Report(signal, *info);
      FinishFirstError();
    } else {
      AwaitFirstError();
    }
  }
  const struct sigaction& previous = prepared.previous[IndexOf(signal)];
  sigaction(signal, &previous, nullptr);
  errno = saved_errno;
  // A previous handler gets the fault itself, which happens again when this handler returns. Any
  // other signal is raised again; it is blocked until this handler returns.
  const bool has_handler = previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN;
  const bool happens_again = signal == SIGSEGV || signal == SIGFPE || signal == SIGILL;
  if (has_handler && CameFromTheKernel(*info) && happens_again) return;
  raise(signal);
}

// The stack is never freed: a handler may run until the process ends.
void GiveThisThreadASignalStack() {
  stack_t current{};
  if (sigaltstack(nullptr, &current) == 0 && (current.ss_flags & SS_DISABLE) == 0) return;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t wanted = getauxval(AT_MINSIGSTKSZ) + 64 * 1024;
  const size_t size = (wanted + page - 1) / page * page;
  void* memory = mmap(nullptr, size + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  char* bottom = static_cast<char*>(memory) + page;  // the page below is a guard page
  if (mprotect(bottom, size, PROT_READ | PROT_WRITE) != 0) return;
  const stack_t mine{.ss_sp = bottom, .ss_flags = 0, .ss_size = size};
  sigaltstack(&mine, nullptr);
}

void PrepareFile() {
  prepared.pid = getpid();
  prepared.path.Clear();
  prepared.beside.Clear();
  const char* path = std::getenv(kErrorFileVariable);
  prepared.has_path = path != nullptr && path[0] != '\0' && std::strlen(path) < 4000;
  if (!prepared.has_path) return;
  prepared.path.Add(path);
  prepared.beside.Add(path).Add(".tmp").AddNumber(static_cast<uint64_t>(prepared.pid)).Add("s");
}

}  // namespace

void install_fatal_signal_handlers() {
  PrepareFile();
  if (is_installed.exchange(true)) return;
  // The first call of backtrace() loads the unwinder, with locks and allocations; later calls do
  // not.
  void* frame = nullptr;
  backtrace(&frame, 1);
  GiveThisThreadASignalStack();
  for (size_t i = 0; i < kFatalSignals.size(); ++i) {
    const int signal = kFatalSignals[i].number;
    sigaction(signal, nullptr, &prepared.previous[i]);
    if (prepared.previous[i].sa_handler == SIG_IGN) continue;
    struct sigaction action {};
    action.sa_sigaction = &OnFatalSignal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigfillset(&action.sa_mask);
    sigaction(signal, &action, nullptr);
  }
}

}  // namespace ddp::elastic

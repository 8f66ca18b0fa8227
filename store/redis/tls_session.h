#ifndef DDP_STORE_REDIS_TLS_SESSION_H_
#define DDP_STORE_REDIS_TLS_SESSION_H_

#include <cstddef>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "store/redis/redis_endpoint.h"

// OpenSSL's.
struct ssl_st;

namespace ddp::store {

// TLS (1.2 or newer) over a connected socket, as its client. The server's certificate must be
// signed by one of `RedisEndpoint::tls_files`, or of the system's where it names none, and must be
// for the host that the user named.
//
// No method blocks or raises SIGPIPE. Thread-safe: one thread may receive while another sends.
class TlsSession {
 public:
  // `fd` is not owned, and must live as long. Reads the endpoint's files, so that each connection
  // uses a renewed certificate. kFailedPrecondition: a file cannot be read, or is not what it
  // should be; the message names it.
  static absl::StatusOr<std::unique_ptr<TlsSession>> Start(int fd, const RedisEndpoint& endpoint);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Goes on with the handshake. Returns 0 when it is done, or else POLLIN or POLLOUT: what the
  // socket must be ready for before the next call. kUnauthenticated: the server's certificate is
  // not accepted. kUnavailable: the connection broke, or the server speaks no TLS.
  absl::StatusOr<short> Handshake();

  // Send as many of `bytes`, or receive as many into `buffer`, as is possible at once, and return
  // the number. A buffer of at least 16 KiB takes all that poll(2) would not tell of. After 0 from
  // Send(), the next call must repeat the same bytes. kUnavailable: the connection broke or was
  // closed. kUnauthenticated: the server demands a client's certificate.
  absl::StatusOr<size_t> Send(absl::string_view bytes);
  absl::StatusOr<size_t> Receive(absl::Span<char> buffer);

  // Returns true when a byte can be received. Errors: those of Receive(). No other thread may be
  // receiving.
  absl::StatusOr<bool> HasInput();

 private:
  struct Free {
    void operator()(ssl_st* ssl) const;
  };

  TlsSession(std::unique_ptr<ssl_st, Free> ssl, const RedisEndpoint& endpoint);

  absl::StatusOr<size_t> Judge(int result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RedisEndpoint endpoint_;
  Mutex mutex_;
  const std::unique_ptr<ssl_st, Free> ssl_ ABSL_PT_GUARDED_BY(mutex_);
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_TLS_SESSION_H_

#include "store/redis/tls_session.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/name_lookup.h"
#include "base/status_macros.h"
#include "openssl/bio.h"
#include "openssl/err.h"
#include "openssl/ssl.h"
#include "openssl/x509v3.h"

namespace ddp::store {
namespace {

// The socket as OpenSSL sees it. (Its own kind blocks on a blocking socket, and raises SIGPIPE.)
// ----

int FdOf(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio))); }

int WriteToSocket(BIO* bio, const char* bytes, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t count = send(FdOf(bio), bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count < 0 && BIO_sock_should_retry(-1) != 0) BIO_set_retry_write(bio);
  return static_cast<int>(count);
}

int ReadFromSocket(BIO* bio, char* bytes, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t count = recv(FdOf(bio), bytes, size, MSG_DONTWAIT);
  if (count < 0 && BIO_sock_should_retry(-1) != 0) BIO_set_retry_read(bio);
  return static_cast<int>(count);
}

long ControlSocket(BIO* /*bio*/, int command, long /*number*/, void* /*pointer*/) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

BIO* NewSocketBio(int fd) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");
    BIO_meth_set_write(made, &WriteToSocket);
    BIO_meth_set_read(made, &ReadFromSocket);
    BIO_meth_set_ctrl(made, &ControlSocket);
    return made;
  }();
  BIO* const bio = BIO_new(method);
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(fd)));
  BIO_set_init(bio, 1);
  return bio;
}

// Settings. ---------------------------------------------------------------------------------------

// Returns the first error of the calling thread's queue, and empties it.
std::string TakeError() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  if (code == 0) return "";
  if (ERR_SYSTEM_ERROR(code)) return strerror(ERR_GET_REASON(code));
  const char* const reason = ERR_reason_error_string(code);
  return reason == nullptr ? absl::StrCat("error ", code) : reason;
}

absl::Status FileError(const char* key, const std::string& path) {
  return absl::FailedPreconditionError(absl::StrCat(key, "=", path, ": ", TakeError()));
}

absl::Status LoadFiles(const RedisEndpoint& endpoint, SSL_CTX* context) {
  const std::string& ca = endpoint.tls_ca_cert_file;
  if (ca.empty()) {
    SSL_CTX_set_default_verify_paths(context);
  } else if (SSL_CTX_load_verify_file(context, ca.c_str()) != 1) {
    return FileError("tls_ca_cert_file", ca);
  }
  const std::string& cert = endpoint.tls_cert_file;
  const std::string& key = endpoint.tls_key_file;
  if (cert.empty()) return absl::OkStatus();
  if (SSL_CTX_use_certificate_chain_file(context, cert.c_str()) != 1) {
    return FileError("tls_cert_file", cert);
  }
  if (SSL_CTX_use_PrivateKey_file(context, key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context) != 1) {
    return FileError("tls_key_file", key);
  }
  return absl::OkStatus();
}

bool SetServerName(const std::string& host, SSL* ssl) {
  if (IsNumericAddress(host)) {
    return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host.c_str()) == 1;
  }
  return SSL_set1_host(ssl, host.c_str()) == 1 && SSL_set_tlsext_host_name(ssl, host.c_str()) == 1;
}

int Limited(size_t size) { return static_cast<int>(std::min<size_t>(size, INT_MAX)); }

}  // namespace

void TlsSession::Free::operator()(SSL* ssl) const { SSL_free(ssl); }

TlsSession::TlsSession(std::unique_ptr<SSL, Free> ssl, const RedisEndpoint& endpoint)
    : endpoint_(endpoint), ssl_(std::move(ssl)) {}

TlsSession::~TlsSession() = default;

absl::StatusOr<std::unique_ptr<TlsSession>> TlsSession::Start(int fd,
                                                              const RedisEndpoint& endpoint) {
  ERR_clear_error();
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_client_method()),
                                                             &SSL_CTX_free);
  if (context == nullptr) return absl::ResourceExhaustedError(absl::StrCat("TLS: ", TakeError()));
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  DDP_RETURN_IF_ERROR(LoadFiles(endpoint, context.get()));
  std::unique_ptr<SSL, Free> ssl(SSL_new(context.get()));
  if (ssl == nullptr || !SetServerName(endpoint.host, ssl.get())) {
    return absl::FailedPreconditionError(
        absl::StrCat("TLS to ", endpoint.DebugString(), ": ", TakeError()));
  }
  BIO* const bio = NewSocketBio(fd);
  SSL_set_bio(ssl.get(), bio, bio);
  SSL_set_connect_state(ssl.get());
  return std::unique_ptr<TlsSession>(new TlsSession(std::move(ssl), endpoint));
}

absl::StatusOr<short> TlsSession::Handshake() {
  const MutexLock lock(mutex_);
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  if (result == 1) return short{0};
  DDP_RETURN_IF_ERROR(Judge(result).status());
  return static_cast<short>(SSL_want_write(ssl_.get()) ? POLLOUT : POLLIN);
}

absl::StatusOr<size_t> TlsSession::Send(absl::string_view bytes) {
  const MutexLock lock(mutex_);
  ERR_clear_error();
  return Judge(SSL_write(ssl_.get(), bytes.data(), Limited(bytes.size())));
}

absl::StatusOr<size_t> TlsSession::Receive(absl::Span<char> buffer) {
  const MutexLock lock(mutex_);
  ERR_clear_error();
  return Judge(SSL_read(ssl_.get(), buffer.data(), Limited(buffer.size())));
}

absl::StatusOr<bool> TlsSession::HasInput() {
  const MutexLock lock(mutex_);
  ERR_clear_error();
  char byte = 0;
  DDP_ASSIGN_OR_RETURN(const size_t count, Judge(SSL_peek(ssl_.get(), &byte, 1)));
  return count > 0;
}

// Returns the number of bytes of one of OpenSSL's calls that returned `result`; 0: the socket is
// not ready for more.
absl::StatusOr<size_t> TlsSession::Judge(int result) {
  if (result > 0) return static_cast<size_t>(result);
  const int system_error = errno;
  const int kind = SSL_get_error(ssl_.get(), result);
  if (kind == SSL_ERROR_WANT_READ || kind == SSL_ERROR_WANT_WRITE) return size_t{0};
  const std::string server = absl::StrCat("Redis at ", endpoint_.DebugString());
  if (kind == SSL_ERROR_ZERO_RETURN) {
    return absl::UnavailableError(absl::StrCat(server, " closed the connection"));
  }
  if (const long verified = SSL_get_verify_result(ssl_.get()); verified != X509_V_OK) {
    ERR_clear_error();
    return absl::UnauthenticatedError(absl::StrCat(
        server, ": its certificate is not accepted: ", X509_verify_cert_error_string(verified)));
  }
  const int reason = ERR_GET_REASON(ERR_peek_error());
  std::string text = TakeError();
  if (reason == SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED ||
      reason == SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE) {
    return absl::UnauthenticatedError(absl::StrCat(
        server, ": TLS: ", text, ": give it a certificate by tls_cert_file and tls_key_file"));
  }
  if (kind == SSL_ERROR_SYSCALL || reason == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
    const bool is_reset = kind == SSL_ERROR_SYSCALL && system_error != 0;
    text = is_reset ? strerror(system_error) : "the connection was closed";
  }
  return absl::UnavailableError(absl::StrCat(server, ": TLS: ", text));
}

}  // namespace ddp::store

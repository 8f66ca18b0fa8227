#ifndef DDP_TESTING_REDIS_TLS_CERTIFICATES_H_
#define DDP_TESTING_REDIS_TLS_CERTIFICATES_H_

#include <string>

namespace ddp::testing {

// A certificate authority of a test, in a folder of its own, and certificates that it has signed.
// They are valid for a day.
class TlsCertificates {
 public:
  TlsCertificates();
  ~TlsCertificates();
  TlsCertificates(const TlsCertificates&) = delete;
  TlsCertificates& operator=(const TlsCertificates&) = delete;

  // The authority's own certificate.
  std::string ca() const { return At("ca.pem"); }

  // For a server at "localhost" and 127.0.0.1.
  std::string server_cert() const { return At("server.pem"); }
  std::string server_key() const { return At("server.key"); }

  std::string client_cert() const { return At("client.pem"); }
  std::string client_key() const { return At("client.key"); }

 private:
  std::string At(const char* name) const { return folder_ + "/" + name; }

  std::string folder_ = "/tmp/ddp-tls-test-XXXXXX";
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_REDIS_TLS_CERTIFICATES_H_

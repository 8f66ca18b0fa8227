#include "testing/redis/tls_certificates.h"

#include <glog/logging.h>
#include <stdio.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <system_error>

#include "openssl/ec.h"
#include "openssl/evp.h"
#include "openssl/pem.h"
#include "openssl/x509.h"
#include "openssl/x509v3.h"

namespace ddp::testing {
namespace {

using Key = std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)>;
using Certificate = std::unique_ptr<X509, void (*)(X509*)>;
using File = std::unique_ptr<FILE, int (*)(FILE*)>;

Key NewKey() { return Key(EVP_EC_gen("P-256"), &EVP_PKEY_free); }

void AddExtension(X509* certificate, int kind, const char* value) {
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, nullptr, kind, value);
  CHECK(extension != nullptr) << value;
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

// Returns a certificate of `key` that is not signed yet.
Certificate NewCertificate(const char* name, long number, EVP_PKEY* key) {
  Certificate made(X509_new(), &X509_free);
  X509_set_version(made.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(made.get()), number);
  X509_gmtime_adj(X509_getm_notBefore(made.get()), -3600);
  X509_gmtime_adj(X509_getm_notAfter(made.get()), 24L * 3600);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(made.get()), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name), -1, -1, 0);
  X509_set_pubkey(made.get(), key);
  return made;
}

void Write(const std::string& path, X509* certificate) {
  const File file(fopen(path.c_str(), "we"), &fclose);
  CHECK(file != nullptr && PEM_write_X509(file.get(), certificate) == 1) << path;
}

void Write(const std::string& path, EVP_PKEY* key) {
  const File file(fopen(path.c_str(), "we"), &fclose);
  CHECK(file != nullptr &&
        PEM_write_PrivateKey(file.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1)
      << path;
}

}  // namespace

TlsCertificates::TlsCertificates() {
  CHECK(mkdtemp(folder_.data()) != nullptr) << "cannot make a folder in /tmp";
  const Key ca_key = NewKey();
  const Certificate ca = NewCertificate("test authority", 1, ca_key.get());
  X509_set_issuer_name(ca.get(), X509_get_subject_name(ca.get()));
  AddExtension(ca.get(), NID_basic_constraints, "critical,CA:TRUE");
  X509_sign(ca.get(), ca_key.get(), EVP_sha256());
  Write(this->ca(), ca.get());
  const auto sign = [&](const char* name, long number, const std::string& cert_path,
                        const std::string& key_path) {
    const Key key = NewKey();
    const Certificate made = NewCertificate(name, number, key.get());
    X509_set_issuer_name(made.get(), X509_get_subject_name(ca.get()));
    AddExtension(made.get(), NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
    X509_sign(made.get(), ca_key.get(), EVP_sha256());
    Write(cert_path, made.get());
    Write(key_path, key.get());
  };
  sign("test server", 2, server_cert(), server_key());
  sign("test client", 3, client_cert(), client_key());
}

TlsCertificates::~TlsCertificates() {
  std::error_code none;
  std::filesystem::remove_all(folder_, none);
}

}  // namespace ddp::testing

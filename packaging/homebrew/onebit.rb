# Homebrew's recipe for the library on macOS, without MPI, from a checkout (docs/packages.md):
#
#   brew tap-new local/onebit
#   cp packaging/homebrew/onebit.rb "$(brew --repository local/onebit)/Formula"
#   HOMEBREW_ONEBIT_SOURCE=$PWD brew install --HEAD local/onebit/onebit
class Onebit < Formula
  desc "Compressed collectives with error feedback, and the optimizers that converge with them"
  license "BSD-3-Clause"
  head "file://#{ENV.fetch("HOMEBREW_ONEBIT_SOURCE", Dir.pwd)}", using: :git, branch: "main"

  depends_on "make" => :build # 4; that of macOS is 3.81
  depends_on "pkgconf" => :test
  depends_on :macos

  def install
    system "gmake", "-j#{ENV.make_jobs}", "PREFIX=#{prefix}"
    system "gmake", "install", "PREFIX=#{prefix}"
    pkgshare.install "examples/minimal.c"
  end

  test do
    system bin/"onebit-info"
    flags = shell_output("pkg-config --cflags --libs onebit").split
    system ENV.cc, pkgshare/"minimal.c", "-o", "minimal", *flags
    assert_match "ONEBIT_OK", shell_output("./minimal")
  end
end

# Spack's recipe for onebit. In a checkout: `spack dev-build --source-path . onebit@main`, after
# this file has been copied to packages/onebit/package.py of a repository of yours (`spack repo
# create`).
import os

from spack.package import *

try:  # Spack 1 has the build systems here; before, they come with the line above
    from spack_repo.builtin.build_systems.cuda import CudaPackage
    from spack_repo.builtin.build_systems.makefile import MakefilePackage
except ImportError:
    pass


class Onebit(MakefilePackage, CudaPackage):
    """Compressed collectives with error feedback (allreduce, allgather and reduce-scatter that
    send one bit an element), and the optimizers that converge with them, over MPI and NCCL."""

    # Sources come from a checkout: ONEBIT_GIT names it, or `spack dev-build` is in it.
    git = os.environ.get("ONEBIT_GIT", "")

    license("BSD-3-Clause", checked_by="onebit")

    version("main", branch="main")

    variant("mpi", default=True, description="Ranks over MPI; without, ranks are threads")
    variant("openmp", default=True, description="Several threads compress and reduce")
    variant("nccl", default=False, when="+cuda", description="GPUs exchange over NCCL")

    depends_on("c", type="build")
    depends_on("cxx", type="build", when="+cuda")
    depends_on("mpi@3:", when="+mpi")
    depends_on("cuda@11.4:", when="+cuda")
    depends_on("nccl@2.18:", when="+nccl")
    depends_on("pkgconfig", type="test")
    depends_on("cmake@3.13:", type="test")

    for _arch in CudaPackage.cuda_arch_values:
        if int("".join(c for c in _arch if c.isdigit())) < 80:
            conflicts("cuda_arch=" + _arch, when="+cuda", msg="needs compute capability 8.0")

    @property
    def settings(self):
        """Returns the variables of make: it is told everything, and guesses nothing from the machine."""
        spec, prefix = self.spec, self.prefix

        def one(variant):
            return "1" if spec.satisfies("+" + variant) else "0"

        settings = [
            "V=1",
            "BUILD=build",
            "FORTRAN=0",
            "PREFIX=" + str(prefix),
            "LIBDIR=" + str(prefix.lib),
            "MPI=" + one("mpi"),
            "OPENMP=" + one("openmp"),
            "CUDA=" + one("cuda"),
            "NCCL=" + one("nccl"),
        ]
        if spec.satisfies("+mpi"):
            settings.append("MPICC=" + spec["mpi"].mpicc)
        if spec.satisfies("+cuda"):
            home = str(spec["cuda"].prefix)
            settings += ["CUDA_HOME=" + home, "NVCC=" + os.path.join(home, "bin", "nvcc")]
            archs = [a for a in spec.variants["cuda_arch"].value if a != "none"]
            if archs:
                settings.append("CUDA_ARCHS=" + " ".join(archs))
        return settings

    @property
    def build_targets(self):
        return self.settings + ["all"]

    @property
    def install_targets(self):
        return self.settings + ["install"]

    def check(self):
        """Checks what a package can break; the library's own tests are `make check`."""
        with working_dir(self.stage.source_path):
            make(*self.settings, "installed-check", "TESTS=check-symbols check-abi check-install")

    def setup_run_environment(self, env):
        env.set("ONEBIT_ROOT", self.prefix)

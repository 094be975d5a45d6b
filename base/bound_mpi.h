/*
 * MPI's entry points, bound at run time, since the library is not linked to any MPI. The first use
 * looks them up in the MPI library that the process has loaded, and stores them in one table. A
 * file that calls MPI includes this header in place of <mpi.h>: the names below then stand for the
 * table's members, and calls are written as usual. A call of a function that has no row below gives
 * an undefined reference when the library is linked; add a row and a #define for it.
 *
 * The library uses the ABI of the mpi.h that it was built with. It refuses to run in a process
 * whose MPI has another ABI.
 */
#ifndef OB_BASE_BOUND_MPI_H
#define OB_BASE_BOUND_MPI_H

#include <mpi.h>
#include <stdbool.h>
#include <stddef.h>

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

#include "base/find_mpi.h"
#include "onebit/status.h"

#ifdef OPEN_MPI
#define OB_MPI_KIND OB_MPI_OPENMPI
#elif defined(MPI_ABI_VERSION) && !defined(MPICH_VERSION)
#define OB_MPI_KIND OB_MPI_STANDARD
#else
#define OB_MPI_KIND OB_MPI_MPICH
#endif

/* Every MPI library since MPI 3 has these functions. A library that lacks one of them is not
 * used. */
#define OB_MPI_REQUIRED(X)                                                                         \
  X(MPI_Cancel)                                                                                    \
  X(MPI_Comm_free)                                                                                 \
  X(MPI_Comm_get_attr)                                                                             \
  X(MPI_Comm_group)                                                                                \
  X(MPI_Comm_rank)                                                                                 \
  X(MPI_Comm_set_errhandler)                                                                       \
  X(MPI_Comm_size)                                                                                 \
  X(MPI_Comm_split)                                                                                \
  X(MPI_Comm_split_type)                                                                           \
  X(MPI_Comm_test_inter)                                                                           \
  X(MPI_Error_string)                                                                              \
  X(MPI_Finalized)                                                                                 \
  X(MPI_Get_count)                                                                                 \
  X(MPI_Group_free)                                                                                \
  X(MPI_Group_size)                                                                                \
  X(MPI_Group_translate_ranks)                                                                     \
  X(MPI_Iallgather)                                                                                \
  X(MPI_Ibarrier)                                                                                  \
  X(MPI_Ibcast)                                                                                    \
  X(MPI_Initialized)                                                                               \
  X(MPI_Iprobe)                                                                                    \
  X(MPI_Irecv)                                                                                     \
  X(MPI_Is_thread_main)                                                                            \
  X(MPI_Isend)                                                                                     \
  X(MPI_Query_thread)                                                                              \
  X(MPI_Recv)                                                                                      \
  X(MPI_Request_get_status)                                                                        \
  X(MPI_Test)                                                                                      \
  X(MPI_Testall)                                                                                   \
  X(PMPI_Abort)                                                                                    \
  X(PMPI_Allgather)                                                                                \
  X(PMPI_Allreduce)                                                                                \
  X(PMPI_Bcast)                                                                                    \
  X(PMPI_Comm_call_errhandler)                                                                     \
  X(PMPI_Comm_create_keyval)                                                                       \
  X(PMPI_Comm_delete_attr)                                                                         \
  X(PMPI_Comm_free)                                                                                \
  X(PMPI_Comm_free_keyval)                                                                         \
  X(PMPI_Comm_get_attr)                                                                            \
  X(PMPI_Comm_get_errhandler)                                                                      \
  X(PMPI_Comm_get_name)                                                                            \
  X(PMPI_Comm_get_parent)                                                                          \
  X(PMPI_Comm_group)                                                                               \
  X(PMPI_Comm_rank)                                                                                \
  X(PMPI_Comm_set_attr)                                                                            \
  X(PMPI_Comm_set_errhandler)                                                                      \
  X(PMPI_Comm_size)                                                                                \
  X(PMPI_Comm_split)                                                                               \
  X(PMPI_Comm_test_inter)                                                                          \
  X(PMPI_Errhandler_free)                                                                          \
  X(PMPI_Error_string)                                                                             \
  X(PMPI_Finalize)                                                                                 \
  X(PMPI_Finalized)                                                                                \
  X(PMPI_Grequest_complete)                                                                        \
  X(PMPI_Grequest_start)                                                                           \
  X(PMPI_Group_free)                                                                               \
  X(PMPI_Group_intersection)                                                                       \
  X(PMPI_Group_size)                                                                               \
  X(PMPI_Iallgather)                                                                               \
  X(PMPI_Iallreduce)                                                                               \
  X(PMPI_Ibcast)                                                                                   \
  X(PMPI_Improbe)                                                                                  \
  X(PMPI_Init)                                                                                     \
  X(PMPI_Init_thread)                                                                              \
  X(PMPI_Initialized)                                                                              \
  X(PMPI_Ireduce)                                                                                  \
  X(PMPI_Ireduce_scatter)                                                                          \
  X(PMPI_Ireduce_scatter_block)                                                                    \
  X(PMPI_Isend)                                                                                    \
  X(PMPI_Lookup_name)                                                                              \
  X(PMPI_Mrecv)                                                                                    \
  X(PMPI_Op_create)                                                                                \
  X(PMPI_Op_free)                                                                                  \
  X(PMPI_Publish_name)                                                                             \
  X(PMPI_Query_thread)                                                                             \
  X(PMPI_Reduce)                                                                                   \
  X(PMPI_Reduce_scatter)                                                                           \
  X(PMPI_Reduce_scatter_block)                                                                     \
  X(PMPI_Request_free)                                                                             \
  X(PMPI_Request_get_status)                                                                       \
  X(PMPI_Status_set_cancelled)                                                                     \
  X(PMPI_Status_set_elements)                                                                      \
  X(PMPI_Test)                                                                                     \
  X(PMPI_Type_commit)                                                                              \
  X(PMPI_Type_contiguous)                                                                          \
  X(PMPI_Type_free)                                                                                \
  X(PMPI_Type_get_extent)                                                                          \
  X(PMPI_Type_get_name)                                                                            \
  X(PMPI_Type_set_name)                                                                            \
  X(PMPI_Type_size)                                                                                \
  X(PMPI_Unpublish_name)                                                                           \
  X(PMPI_Wait)

/* These functions are NULL in the table if the MPI library lacks them: they came with MPI 3.1 or
 * MPI 4, or only one MPI library has them. The mpi.h of the build may not declare them, so their
 * types are written here. */
#define OB_MPI_OPTIONAL(X)                                                                         \
  X(PMPI_Allreduce_c, (const void *, void *, MPI_Count, MPI_Datatype, MPI_Op, MPI_Comm))           \
  X(PMPI_Iallreduce_c,                                                                             \
    (const void *, void *, MPI_Count, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request *))              \
  X(PMPI_Allgather_c,                                                                              \
    (const void *, MPI_Count, MPI_Datatype, void *, MPI_Count, MPI_Datatype, MPI_Comm))            \
  X(PMPI_Iallgather_c, (const void *, MPI_Count, MPI_Datatype, void *, MPI_Count, MPI_Datatype,    \
                        MPI_Comm, MPI_Request *))                                                  \
  X(PMPI_Reduce_scatter_block_c,                                                                   \
    (const void *, void *, MPI_Count, MPI_Datatype, MPI_Op, MPI_Comm))                             \
  X(PMPI_Ireduce_scatter_block_c,                                                                  \
    (const void *, void *, MPI_Count, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request *))              \
  X(PMPI_Allreduce_init,                                                                           \
    (const void *, void *, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Info, MPI_Request *))          \
  X(PMPIX_Allreduce_init,                                                                          \
    (const void *, void *, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Info, MPI_Request *))          \
  X(MPIX_Query_cuda_support, (void))                                                               \
  X(MPIX_GPU_query_support, (int, int *))                                                          \
  X(MPIX_Comm_revoke, (MPI_Comm))                                                                  \
  X(MPIX_Comm_shrink, (MPI_Comm, MPI_Comm *))                                                      \
  X(MPIX_Comm_failure_ack, (MPI_Comm))                                                             \
  X(MPIX_Comm_failure_get_acked, (MPI_Comm, MPI_Group *))

/* In Open MPI, constants are addresses of variables. In MPICH's mpi.h, some functions are
 * macros. */
#ifdef OPEN_MPI
#define OB_MPI_REQUIRED_HERE(X)                                                                    \
  X(OMPI_C_MPI_COMM_NULL_COPY_FN)                                                                  \
  X(OMPI_C_MPI_COMM_NULL_DELETE_FN)                                                                \
  X(PMPI_Comm_f2c)                                                                                 \
  X(PMPI_Op_f2c)                                                                                   \
  X(PMPI_Request_c2f)                                                                              \
  X(PMPI_Type_f2c)
#define OB_MPI_OPTIONAL_VARIABLES(X) X(ompi_mpi_short_float) /* only Open MPI 5 has it */
#define OB_MPI_VARIABLES(X)                                                                        \
  X(ompi_mpi_byte)                                                                                 \
  X(ompi_mpi_char)                                                                                 \
  X(ompi_mpi_comm_null)                                                                            \
  X(ompi_mpi_comm_self)                                                                            \
  X(ompi_mpi_comm_world)                                                                           \
  X(ompi_mpi_datatype_null)                                                                        \
  X(ompi_mpi_dblprec)                                                                              \
  X(ompi_mpi_double)                                                                               \
  X(ompi_mpi_errors_return)                                                                        \
  X(ompi_mpi_float)                                                                                \
  X(ompi_mpi_info_null)                                                                            \
  X(ompi_mpi_int)                                                                                  \
  X(ompi_mpi_int64_t)                                                                              \
  X(ompi_mpi_op_max)                                                                               \
  X(ompi_mpi_op_min)                                                                               \
  X(ompi_mpi_op_null)                                                                              \
  X(ompi_mpi_op_sum)                                                                               \
  X(ompi_mpi_real)                                                                                 \
  X(ompi_mpi_real4)                                                                                \
  X(ompi_mpi_real8)                                                                                \
  X(ompi_mpi_uint64_t)                                                                             \
  X(ompi_request_null)
#else
#define OB_MPI_REQUIRED_HERE(X)
#define OB_MPI_OPTIONAL_VARIABLES(X)
#define OB_MPI_VARIABLES(X)
#endif

#define OB_MPI_DECLARED(name)            __typeof__(name) *name;
#define OB_MPI_WRITTEN(name, parameters) int(*name) parameters;
#define OB_MPI_ADDRESS(name)             void *name;
struct ob_mpi_table {
  OB_MPI_REQUIRED(OB_MPI_DECLARED)
  OB_MPI_REQUIRED_HERE(OB_MPI_DECLARED)
  OB_MPI_OPTIONAL(OB_MPI_WRITTEN)
  OB_MPI_OPTIONAL_VARIABLES(OB_MPI_ADDRESS)
  OB_MPI_VARIABLES(OB_MPI_ADDRESS)
};

/* Binds MPI's functions at the first call that finds an MPI library in the process; thread-safe.
 * Errors: ONEBIT_ERROR_UNSUPPORTED if the process has no MPI library, if the library lacks a
 * required function, or if its ABI is not the build's: the message then names both ABIs. */
onebit_status_t ob_mpi_bind(void);

/* True if the process's MPI library has another ABI than the build's, so that its handles cannot be
 * used here. */
bool ob_mpi_is_foreign(void);

/* Returns the table. It has the functions even if the library's ABI is foreign. If the process has
 * no MPI library, ob_mpi ends the process with a message; a caller that does not know calls
 * ob_mpi_bind first. */
const struct ob_mpi_table *ob_mpi(void);

/* Returns the name and version of the bound library, as the library reports them. */
const char *ob_mpi_version(void);

/* Returns the address of another symbol, in the bound library or a library that it depends on;
 * NULL: not found. */
void *ob_mpi_symbol(const char *name);

/* Returns this process's rank, as the launcher's environment variables give it; 0 without such
 * variables. */
int ob_launch_rank(void);

/* True if the launcher of another MPI has started several ranks; `text` then has the explanation.
 * May be called before MPI_Init, which in MPICH 5 ends such a program. */
bool ob_launch_is_foreign(char *text, size_t bytes);

/* Checks that the launcher belongs to the MPI library. Called between MPI_Init and MPI_Finalize,
 * with a communicator of the program. If the launcher of one MPI starts a program that is linked to
 * another MPI, each process is a job of its own with one rank, and the program seems to succeed. In
 * such a case the launcher announces several ranks while MPI_COMM_WORLD has one. The function then
 * returns ONEBIT_ERROR_UNSUPPORTED if the launcher belongs to another MPI. If one rank per job may
 * be intended (srun, mpirun of the same MPI), it returns ONEBIT_OK and prints one line on standard
 * error. A rank that MPI_Comm_spawn started, or a call on MPI_COMM_SELF, is not checked. */
onebit_status_t ob_launch_check(MPI_Comm comm);

#define MPI_Cancel                   (ob_mpi()->MPI_Cancel)
#define MPI_Comm_free                (ob_mpi()->MPI_Comm_free)
#define MPI_Comm_get_attr            (ob_mpi()->MPI_Comm_get_attr)
#define MPI_Comm_group               (ob_mpi()->MPI_Comm_group)
#define MPI_Comm_rank                (ob_mpi()->MPI_Comm_rank)
#define MPI_Comm_set_errhandler      (ob_mpi()->MPI_Comm_set_errhandler)
#define MPI_Comm_size                (ob_mpi()->MPI_Comm_size)
#define MPI_Comm_split               (ob_mpi()->MPI_Comm_split)
#define MPI_Comm_split_type          (ob_mpi()->MPI_Comm_split_type)
#define MPI_Comm_test_inter          (ob_mpi()->MPI_Comm_test_inter)
#define MPI_Error_string             (ob_mpi()->MPI_Error_string)
#define MPI_Finalized                (ob_mpi()->MPI_Finalized)
#define MPI_Get_count                (ob_mpi()->MPI_Get_count)
#define MPI_Group_free               (ob_mpi()->MPI_Group_free)
#define MPI_Group_size               (ob_mpi()->MPI_Group_size)
#define MPI_Group_translate_ranks    (ob_mpi()->MPI_Group_translate_ranks)
#define MPI_Iallgather               (ob_mpi()->MPI_Iallgather)
#define MPI_Ibarrier                 (ob_mpi()->MPI_Ibarrier)
#define MPI_Ibcast                   (ob_mpi()->MPI_Ibcast)
#define MPI_Initialized              (ob_mpi()->MPI_Initialized)
#define MPI_Iprobe                   (ob_mpi()->MPI_Iprobe)
#define MPI_Irecv                    (ob_mpi()->MPI_Irecv)
#define MPI_Is_thread_main           (ob_mpi()->MPI_Is_thread_main)
#define MPI_Isend                    (ob_mpi()->MPI_Isend)
#define MPI_Query_thread             (ob_mpi()->MPI_Query_thread)
#define MPI_Recv                     (ob_mpi()->MPI_Recv)
#define MPI_Request_get_status       (ob_mpi()->MPI_Request_get_status)
#define MPI_Test                     (ob_mpi()->MPI_Test)
#define MPI_Testall                  (ob_mpi()->MPI_Testall)
#define PMPI_Abort                   (ob_mpi()->PMPI_Abort)
#define PMPI_Allgather               (ob_mpi()->PMPI_Allgather)
#define PMPI_Allreduce               (ob_mpi()->PMPI_Allreduce)
#define PMPI_Bcast                   (ob_mpi()->PMPI_Bcast)
#define PMPI_Comm_call_errhandler    (ob_mpi()->PMPI_Comm_call_errhandler)
#define PMPI_Comm_create_keyval      (ob_mpi()->PMPI_Comm_create_keyval)
#define PMPI_Comm_delete_attr        (ob_mpi()->PMPI_Comm_delete_attr)
#define PMPI_Comm_free               (ob_mpi()->PMPI_Comm_free)
#define PMPI_Comm_free_keyval        (ob_mpi()->PMPI_Comm_free_keyval)
#define PMPI_Comm_get_attr           (ob_mpi()->PMPI_Comm_get_attr)
#define PMPI_Comm_get_errhandler     (ob_mpi()->PMPI_Comm_get_errhandler)
#define PMPI_Comm_get_name           (ob_mpi()->PMPI_Comm_get_name)
#define PMPI_Comm_get_parent         (ob_mpi()->PMPI_Comm_get_parent)
#define PMPI_Comm_group              (ob_mpi()->PMPI_Comm_group)
#define PMPI_Comm_rank               (ob_mpi()->PMPI_Comm_rank)
#define PMPI_Comm_set_attr           (ob_mpi()->PMPI_Comm_set_attr)
#define PMPI_Comm_set_errhandler     (ob_mpi()->PMPI_Comm_set_errhandler)
#define PMPI_Comm_size               (ob_mpi()->PMPI_Comm_size)
#define PMPI_Comm_split              (ob_mpi()->PMPI_Comm_split)
#define PMPI_Comm_test_inter         (ob_mpi()->PMPI_Comm_test_inter)
#define PMPI_Errhandler_free         (ob_mpi()->PMPI_Errhandler_free)
#define PMPI_Error_string            (ob_mpi()->PMPI_Error_string)
#define PMPI_Finalize                (ob_mpi()->PMPI_Finalize)
#define PMPI_Finalized               (ob_mpi()->PMPI_Finalized)
#define PMPI_Grequest_complete       (ob_mpi()->PMPI_Grequest_complete)
#define PMPI_Grequest_start          (ob_mpi()->PMPI_Grequest_start)
#define PMPI_Group_free              (ob_mpi()->PMPI_Group_free)
#define PMPI_Group_intersection      (ob_mpi()->PMPI_Group_intersection)
#define PMPI_Group_size              (ob_mpi()->PMPI_Group_size)
#define PMPI_Iallgather              (ob_mpi()->PMPI_Iallgather)
#define PMPI_Iallreduce              (ob_mpi()->PMPI_Iallreduce)
#define PMPI_Ibcast                  (ob_mpi()->PMPI_Ibcast)
#define PMPI_Improbe                 (ob_mpi()->PMPI_Improbe)
#define PMPI_Init                    (ob_mpi()->PMPI_Init)
#define PMPI_Init_thread             (ob_mpi()->PMPI_Init_thread)
#define PMPI_Initialized             (ob_mpi()->PMPI_Initialized)
#define PMPI_Ireduce                 (ob_mpi()->PMPI_Ireduce)
#define PMPI_Ireduce_scatter         (ob_mpi()->PMPI_Ireduce_scatter)
#define PMPI_Ireduce_scatter_block   (ob_mpi()->PMPI_Ireduce_scatter_block)
#define PMPI_Isend                   (ob_mpi()->PMPI_Isend)
#define PMPI_Lookup_name             (ob_mpi()->PMPI_Lookup_name)
#define PMPI_Mrecv                   (ob_mpi()->PMPI_Mrecv)
#define PMPI_Op_create               (ob_mpi()->PMPI_Op_create)
#define PMPI_Op_free                 (ob_mpi()->PMPI_Op_free)
#define PMPI_Publish_name            (ob_mpi()->PMPI_Publish_name)
#define PMPI_Query_thread            (ob_mpi()->PMPI_Query_thread)
#define PMPI_Reduce                  (ob_mpi()->PMPI_Reduce)
#define PMPI_Reduce_scatter          (ob_mpi()->PMPI_Reduce_scatter)
#define PMPI_Reduce_scatter_block    (ob_mpi()->PMPI_Reduce_scatter_block)
#define PMPI_Request_free            (ob_mpi()->PMPI_Request_free)
#define PMPI_Request_get_status      (ob_mpi()->PMPI_Request_get_status)
#define PMPI_Status_set_cancelled    (ob_mpi()->PMPI_Status_set_cancelled)
#define PMPI_Status_set_elements     (ob_mpi()->PMPI_Status_set_elements)
#define PMPI_Test                    (ob_mpi()->PMPI_Test)
#define PMPI_Type_commit             (ob_mpi()->PMPI_Type_commit)
#define PMPI_Type_contiguous         (ob_mpi()->PMPI_Type_contiguous)
#define PMPI_Type_free               (ob_mpi()->PMPI_Type_free)
#define PMPI_Type_get_extent         (ob_mpi()->PMPI_Type_get_extent)
#define PMPI_Type_get_name           (ob_mpi()->PMPI_Type_get_name)
#define PMPI_Type_set_name           (ob_mpi()->PMPI_Type_set_name)
#define PMPI_Type_size               (ob_mpi()->PMPI_Type_size)
#define PMPI_Unpublish_name          (ob_mpi()->PMPI_Unpublish_name)
#define PMPI_Wait                    (ob_mpi()->PMPI_Wait)
#define PMPI_Allreduce_c             (ob_mpi()->PMPI_Allreduce_c)
#define PMPI_Iallreduce_c            (ob_mpi()->PMPI_Iallreduce_c)
#define PMPI_Allgather_c             (ob_mpi()->PMPI_Allgather_c)
#define PMPI_Iallgather_c            (ob_mpi()->PMPI_Iallgather_c)
#define PMPI_Reduce_scatter_block_c  (ob_mpi()->PMPI_Reduce_scatter_block_c)
#define PMPI_Ireduce_scatter_block_c (ob_mpi()->PMPI_Ireduce_scatter_block_c)
#define PMPI_Allreduce_init          (ob_mpi()->PMPI_Allreduce_init)
#define PMPIX_Allreduce_init         (ob_mpi()->PMPIX_Allreduce_init)
#define MPIX_Query_cuda_support      (ob_mpi()->MPIX_Query_cuda_support)
#define MPIX_GPU_query_support       (ob_mpi()->MPIX_GPU_query_support)
#define MPIX_Comm_revoke             (ob_mpi()->MPIX_Comm_revoke)
#define MPIX_Comm_shrink             (ob_mpi()->MPIX_Comm_shrink)
#define MPIX_Comm_failure_ack        (ob_mpi()->MPIX_Comm_failure_ack)
#define MPIX_Comm_failure_get_acked  (ob_mpi()->MPIX_Comm_failure_get_acked)
#ifdef OPEN_MPI
#define OMPI_C_MPI_COMM_NULL_COPY_FN   (ob_mpi()->OMPI_C_MPI_COMM_NULL_COPY_FN)
#define OMPI_C_MPI_COMM_NULL_DELETE_FN (ob_mpi()->OMPI_C_MPI_COMM_NULL_DELETE_FN)
#define PMPI_Comm_f2c                  (ob_mpi()->PMPI_Comm_f2c)
#define PMPI_Op_f2c                    (ob_mpi()->PMPI_Op_f2c)
#define PMPI_Request_c2f               (ob_mpi()->PMPI_Request_c2f)
#define PMPI_Type_f2c                  (ob_mpi()->PMPI_Type_f2c)
#undef OMPI_PREDEFINED_GLOBAL
#define OMPI_PREDEFINED_GLOBAL(type, global) ((type)ob_mpi()->global)
#endif

#endif

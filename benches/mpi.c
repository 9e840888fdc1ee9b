/*
 * What `doorbell bench pingpong`, `loop` and `collective` measure, by MPI: `scripts/bench --part mpi` runs both in turns.
 *
 *     mpi pingpong ITERATIONS SIZE...     median of a round trip between two ranks, by MPI_Send and MPI_Recv
 *     mpi loop ITERATIONS SIZE...         mean of a message from rank 0 to rank 1, by MPI_Send, until the last one was received
 *     mpi all-reduce ITERATIONS SIZE...   mean of MPI_Allreduce on the slowest rank: a sum of f32
 *
 * Rank 0 prints a line for each size: bytes and microseconds.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void round_trip(int rank, char *out, char *in, int bytes)
{
	if (rank == 0) {
		MPI_Send(out, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
		MPI_Recv(in, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	} else {
		MPI_Recv(in, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		MPI_Send(out, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
	}
}

/* One way. Behind the last message comes an answer, with which the time of rank 0 ends. */
static void one_way(int rank, char *out, char *in, int bytes, int is_last)
{
	if (rank == 0) {
		MPI_Send(out, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
		if (is_last)
			MPI_Recv(in, 0, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	} else {
		MPI_Recv(in, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		if (is_last)
			MPI_Send(out, 0, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
	}
}

int main(int argc, char **argv)
{
	int rank, count, i, k;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &count);
	if (argc < 4 || (strcmp(argv[1], "all-reduce") != 0 && count != 2)) {
		fprintf(stderr, "usage: mpi pingpong|loop|all-reduce ITERATIONS SIZE... (pingpong, loop: 2 ranks)\n");
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	for (k = 3; k < argc; k++) {
		const int bytes = atoi(argv[k]), iterations = atoi(argv[2]), warmup = iterations / 10 + 1;
		const int is_pingpong = strcmp(argv[1], "pingpong") == 0, is_loop = strcmp(argv[1], "loop") == 0;
		double *times = calloc((size_t)iterations, sizeof *times);
		char *out = calloc((size_t)bytes + 1, 1), *in = calloc((size_t)bytes + 1, 1);
		double begun = 0, own, slowest;

		if (times == NULL || out == NULL || in == NULL)
			MPI_Abort(MPI_COMM_WORLD, 2);
		for (i = -warmup; i < iterations; i++) {
			double start;

			if (i == 0) {
				MPI_Barrier(MPI_COMM_WORLD);
				begun = MPI_Wtime();
			}
			start = MPI_Wtime();
			if (is_pingpong)
				round_trip(rank, out, in, bytes);
			else if (is_loop)
				one_way(rank, out, in, bytes, i == -1 || i == iterations - 1);
			else
				MPI_Allreduce(out, in, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
			if (i >= 0)
				times[i] = (MPI_Wtime() - start) * 1e6;
		}
		own = (MPI_Wtime() - begun) * 1e6 / iterations;
		MPI_Reduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
		if (is_pingpong) {
			qsort(times, (size_t)iterations, sizeof *times, by_value);
			slowest = times[iterations / 2];
		}
		if (rank == 0) {
			printf("%d %.3f\n", bytes, slowest);
			fflush(stdout);
		}
		free(times);
		free(out);
		free(in);
	}
	MPI_Finalize();
	return 0;
}

{{/* Which group of a LeaderWorkerSet this pod belongs to. */}}
{{- define "treadle.group" -}}
- name: GROUP
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
{{- end -}}

{{/* A master ends if a worker does not answer at its start, and a pod that ends is restarted with
     growing pauses: better to wait until all listen. */}}
{{- define "treadle.waitForWorkers" -}}
{{- $v := .root.Values -}}
- name: wait-for-workers
  image: {{ include "treadle.image" .root }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  command: [bash, -c]
  args:
    - |
      for worker in ${WORKERS//,/ }; do
        until timeout 2 bash -c "</dev/tcp/${worker%:*}/${worker##*:}" 2>/dev/null; do
          echo "waiting for $worker"
          sleep 1
        done
      done
  env:
    {{- if .lws }}
    {{- include "treadle.group" . | nindent 4 }}
    {{- end }}
    - name: WORKERS
      value: {{ join "," .workers }}
  resources:
    requests:
      cpu: 10m
      memory: 16Mi
    limits:
      memory: 64Mi
  securityContext:
    {{- include "treadle.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
{{- end -}}

{{/* The server's pod: the whole group, or the master of a pipeline.
     Argument: dict of root, workers (addresses; empty: the engine is in this pod). */}}
{{- define "treadle.serverPod" -}}
{{- $v := .root.Values -}}
{{- $p := $v.parallelism -}}
metadata:
  labels:
    {{- include "treadle.selector" .root | nindent 4 }}
    app.kubernetes.io/component: server
    {{- with .group }}
    treadle/group: {{ . }}
    {{- end }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $v.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "treadle.podCommon" (dict "root" .root "graceSeconds" (include "treadle.graceSeconds" .root)) | nindent 2 }}
  {{- if or .workers (eq $v.model.source "url") }}
  initContainers:
    {{- if eq $v.model.source "url" }}
    {{- include "treadle.fetch" .root | nindent 4 }}
    {{- end }}
    {{- if .workers }}
    {{- include "treadle.waitForWorkers" . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: treadle
      image: {{ include "treadle.image" .root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        - serve
        - {{ printf "--model=%s" $v.model.path | quote }}
        - --listen=0.0.0.0:50051
        - --http-listen=0.0.0.0:8080
        - --metrics-listen=0.0.0.0:9400
        - --health-listen=0.0.0.0:50052
        {{- if $v.tls.secret }}
        - --tls-cert=/etc/treadle/tls/tls.crt
        - --tls-key=/etc/treadle/tls/tls.key
        {{- if $v.tls.clientCa }}
        - --tls-client-ca=/etc/treadle/tls/ca.crt
        {{- end }}
        {{- end }}
        {{- if $v.controlTls.secret }}
        - --control-tls=/etc/treadle/control-tls
        {{- end }}
        {{- if include "treadle.controlSecret" .root }}
        - --control-secret-file=/etc/treadle/control-secret/{{ $v.controlSecret.key }}
        {{- end }}
        {{- if $v.apiKeys.secret }}
        - {{ printf "--api-keys-file=/etc/treadle/api-keys/%s" $v.apiKeys.key }}
        {{- if $v.apiKeys.metrics }}
        - --metrics-auth=api-key
        {{- end }}
        {{- end }}
        {{- if $v.metricsTls.secret }}
        - --metrics-tls-cert=/etc/treadle/metrics-tls/tls.crt
        - --metrics-tls-key=/etc/treadle/metrics-tls/tls.key
        {{- if $v.metricsTls.clientCa }}
        - --metrics-tls-client-ca=/etc/treadle/metrics-tls/ca.crt
        {{- end }}
        {{- end }}
        {{- if $v.metricsToken.secret }}
        - {{ printf "--metrics-token-file=/etc/treadle/metrics-token/%s" $v.metricsToken.key }}
        {{- end }}
        {{- include "treadle.logging" .root | nindent 8 }}
        - --log-requests={{ ternary "on" "off" $v.logging.requests }}
        - {{ printf "--drain-timeout=%ds" (int $v.drain.timeoutSeconds) }}
        {{- if gt (int $p.tensor) 1 }}
        - {{ printf "--tensor-parallel=%d" (int $p.tensor) }}
        {{- end }}
        {{- if gt (int $p.pipeline) 1 }}
        {{- if .workers }}
        - {{ printf "--workers=%s" (join "," .workers) }}
        - {{ printf "--weights-from=%s" $p.weightsFrom }}
        {{- else }}
        - {{ printf "--pipeline-parallel=%d" (int $p.pipeline) }}
        {{- end }}
        - {{ printf "--on-worker-loss=%s" $p.onWorkerLoss }}
        - {{ printf "--wire=%s" $p.wire }}
        - {{ printf "--data-plane=%s" $p.dataPlane }}
        {{- end }}
        {{- include "treadle.flags" (dict "root" .root "master" (not (empty .workers))) | trim | nindent 8 }}
      {{- if or $v.env .lws }}
      env:
        {{- if .lws }}
        {{- include "treadle.group" . | nindent 8 }}
        {{- end }}
        {{- with $v.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      ports:
        - name: grpc
          containerPort: 50051
        - name: http
          containerPort: 8080
        - name: metrics
          containerPort: 9400
        - name: health
          containerPort: 50052
      startupProbe:
        {{- with $v.probes.startup }}
        {{- include "treadle.probe" (dict "port" 50052 "probe" . "failureThreshold" (div (add .budgetSeconds .periodSeconds -1) .periodSeconds)) | nindent 8 }}
        {{- end }}
      readinessProbe:
        {{- with $v.probes.readiness }}
        {{- include "treadle.probe" (dict "port" 50052 "probe" . "failureThreshold" .failureThreshold) | nindent 8 }}
        {{- end }}
      livenessProbe:
        {{- with $v.probes.liveness }}
        {{- include "treadle.probe" (dict "port" 50052 "probe" . "failureThreshold" .failureThreshold) | nindent 8 }}
        {{- end }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ $v.drain.beforeSeconds }}
      resources:
        {{- $own := ternary $v.masterResources $v.resources (not (empty .workers)) }}
        {{- include "treadle.resources" (dict "root" .root "resources" $own "gpus" (ternary 0 (include "treadle.gpus" .root | int) (not (empty .workers)))) | nindent 8 }}
      securityContext:
        {{- include "treadle.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "treadle.mounts" (dict "root" .root "model" true "server" true) | nindent 8 }}
  volumes:
    {{- include "treadle.volumes" (dict "root" .root "model" true "server" true) | nindent 4 }}
{{- end -}}

{{/* One stage's pod. Argument: dict of root, group. It outlives the master's drain. */}}
{{- define "treadle.workerPod" -}}
{{- $v := .root.Values -}}
{{- $p := $v.parallelism -}}
{{- $file := eq $p.weightsFrom "file" -}}
metadata:
  labels:
    {{- include "treadle.selector" .root | nindent 4 }}
    app.kubernetes.io/component: worker
    {{- with .group }}
    treadle/group: {{ . }}
    {{- end }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $v.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "treadle.podCommon" (dict "root" .root "graceSeconds" (add (include "treadle.graceSeconds" .root) $v.drain.slackSeconds)) | nindent 2 }}
  {{- if and $file (eq $v.model.source "url") }}
  initContainers:
    {{- include "treadle.fetch" .root | nindent 4 }}
  {{- end }}
  containers:
    - name: treadle
      image: {{ include "treadle.image" .root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        - worker
        - --listen=0.0.0.0:{{ include "treadle.workerPort" .root }}
        {{- if $file }}
        - {{ printf "--model=%s" $v.model.path | quote }}
        {{- end }}
        - --data-interface={{ $p.dataInterface }}
        {{- if gt (int $v.gpu.count) 0 }}
        - --device={{ default "cuda" $v.server.device }}
        {{- end }}
        {{- include "treadle.logging" .root | nindent 8 }}
        {{- if $v.controlTls.secret }}
        - --control-tls=/etc/treadle/control-tls
        {{- end }}
        {{- if include "treadle.controlSecret" .root }}
        - --control-secret-file=/etc/treadle/control-secret/{{ $v.controlSecret.key }}
        {{- end }}
        {{- with $v.server.threads | default (include "treadle.cpus" .root | int) }}
        - --threads={{ max 1 (div . $p.tensor) }}
        {{- end }}
        - --pin-threads={{ default "off" $v.server.pinThreads }}
      {{- with $v.env }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: control
          containerPort: {{ include "treadle.workerPort" .root }}
      {{- /* The control port's listener, and nothing about other stages. */}}
      readinessProbe:
        tcpSocket:
          port: control
        periodSeconds: {{ $v.probes.readiness.periodSeconds }}
      livenessProbe:
        tcpSocket:
          port: control
        periodSeconds: {{ $v.probes.liveness.periodSeconds }}
        timeoutSeconds: {{ $v.probes.liveness.timeoutSeconds }}
        failureThreshold: {{ $v.probes.liveness.failureThreshold }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ add $v.drain.beforeSeconds $v.drain.timeoutSeconds }}
      resources:
        {{- include "treadle.resources" (dict "root" .root "resources" $v.resources "gpus" (include "treadle.gpus" .root | int)) | nindent 8 }}
      securityContext:
        {{- include "treadle.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "treadle.mounts" (dict "root" .root "model" $file) | nindent 8 }}
  volumes:
    {{- include "treadle.volumes" (dict "root" .root "model" $file) | nindent 4 }}
{{- end -}}

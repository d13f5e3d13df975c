{{/* A size in bytes as text: "512M" of treadle (powers of two), "3Gi" and "3G" of Kubernetes.
     Argument: list of the text and "treadle" or "kubernetes". */}}
{{- define "treadle.bytes" -}}
{{- $text := index . 0 | toString -}}
{{- $number := regexFind "^[0-9.]+" $text | float64 -}}
{{- $suffix := regexFind "[A-Za-z]*$" $text -}}
{{- $binary := dict "" 1 "K" 1024 "M" 1048576 "G" 1073741824 "T" 1099511627776 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $decimal := dict "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $factor := get $binary $suffix -}}
{{- if and (eq (index . 1) "kubernetes") (hasKey $decimal $suffix) -}}
{{- $factor = get $decimal $suffix -}}
{{- end -}}
{{- mulf $number $factor | int64 -}}
{{- end -}}

{{/* Combinations that cannot run. What one value alone can tell is in values.schema.json. */}}
{{- define "treadle.check" -}}
{{- $v := .Values -}}
{{- $p := $v.parallelism -}}
{{- $tensor := int $p.tensor -}}
{{- $pipeline := int $p.pipeline -}}
{{- $layout := include "treadle.layout" . -}}

{{- if and (gt (int $v.gpu.count) 0) (ne (int $v.gpu.count) (mul $tensor $pipeline | int)) -}}
{{- fail (printf "gpu.count is %d, expected parallelism.tensor x parallelism.pipeline = %d x %d = %d (or 0 for CPU)" (int $v.gpu.count) $tensor $pipeline (mul $tensor $pipeline)) -}}
{{- end -}}
{{- range $name, $resources := dict "resources" $v.resources "masterResources" $v.masterResources -}}
{{- if hasKey (default dict $resources.limits) $v.gpu.resource -}}
{{- fail (printf "%s.limits has %s: the chart sets it from gpu.count" $name $v.gpu.resource) -}}
{{- end -}}
{{- end -}}
{{- if eq $pipeline 1 -}}
{{- range $name, $plain := dict "topology" "StatefulSet" "weightsFrom" "file" "wire" "f32" "dataPlane" "gloo" -}}
{{- if ne (get $p $name) $plain -}}
{{- fail (printf "parallelism.%s is %s, but parallelism.pipeline is 1: there is no second stage" $name (get $p $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if eq $p.dataPlane "nccl" -}}
{{- if eq (int $v.gpu.count) 0 -}}
{{- fail "parallelism.dataPlane is nccl, but gpu.count is 0: expected GPUs, or gloo" -}}
{{- end -}}
{{- if ne $p.wire "f32" -}}
{{- fail (printf "parallelism.dataPlane is nccl, but parallelism.wire is %s, which only the host encodes: expected f32, or gloo" $p.wire) -}}
{{- end -}}
{{- end -}}

{{- $least := add $v.drain.beforeSeconds $v.drain.timeoutSeconds 3 -}}
{{- with $v.terminationGracePeriodSeconds -}}
{{- if lt (int64 .) $least -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, expected at least %d: drain.beforeSeconds + drain.timeoutSeconds + 3, else accepted requests are killed (0 computes it)" (int64 .) $least) -}}
{{- end -}}
{{- end -}}
{{- if lt (int $v.probes.startup.budgetSeconds) (int $v.probes.startup.periodSeconds) -}}
{{- fail (printf "probes.startup.budgetSeconds is %d, expected at least probes.startup.periodSeconds (%d)" (int $v.probes.startup.budgetSeconds) (int $v.probes.startup.periodSeconds)) -}}
{{- end -}}

{{- $m := $v.model -}}
{{- $needed := dict "pvc" (list "pvc.claim" $m.pvc.claim) "imageVolume" (list "imageVolume.reference" $m.imageVolume.reference) "url" (list "url.url" $m.url.url) -}}
{{- range $source, $pair := $needed -}}
{{- if and (eq $m.source $source) (not (index $pair 1)) -}}
{{- fail (printf "model.source is %s, but model.%s is empty" $source (index $pair 0)) -}}
{{- end -}}
{{- if and (ne $m.source $source) (index $pair 1) -}}
{{- fail (printf "model.%s is set, but model.source is %s, expected %s" (index $pair 0) $m.source $source) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $m.source "url") (not $m.url.sha256) -}}
{{- fail "model.url.sha256 is empty, expected the 64 hexadecimal digits of the file at model.url.url" -}}
{{- end -}}
{{- if and (ne $m.source "container") (not (hasPrefix (printf "%s/" $m.mountPath) $m.path)) -}}
{{- fail (printf "model.path is %s, expected a path under model.mountPath (%s)" $m.path $m.mountPath) -}}
{{- end -}}

{{- $tokens := int (default 0 $v.server.maxBatchTokens) -}}{{/* 0: auto */}}
{{- $size := int (default 0 $v.server.maxBatchSize) -}}
{{- if and $tokens (le $tokens $size) -}}
{{- fail (printf "server.maxBatchTokens is %d, expected more than server.maxBatchSize (%d)" $tokens $size) -}}
{{- end -}}
{{- $limits := default dict $v.resources.limits -}}
{{- $requests := default dict $v.resources.requests -}}
{{- $kv := default "auto" $v.server.kvMemory -}}
{{- if and (ne $kv "auto") $limits.memory (eq (int $v.gpu.count) 0) -}}
{{- $stages := ternary $pipeline 1 (eq $layout "pod") -}}
{{- if ge (mul $stages (include "treadle.bytes" (list $kv "treadle") | int64)) (include "treadle.bytes" (list $limits.memory "kubernetes") | int64) -}}
{{- fail (printf "server.kvMemory is %s for each of %d stages in a pod, expected less than resources.limits.memory (%v), which also holds the weights" $kv $stages $limits.memory) -}}
{{- end -}}
{{- end -}}
{{- if eq (default "off" $v.server.pinThreads) "on" -}}
{{- $cpu := toString (default "none" $limits.cpu) -}}
{{- if or (ne $cpu (toString (default "unset" $requests.cpu))) (not (regexMatch "^[0-9]+$" $cpu)) -}}
{{- fail (printf "server.pinThreads is on, but resources.limits.cpu is %s, expected a whole number equal to resources.requests.cpu: pods that share CPUs would bind their threads to the same ones" $cpu) -}}
{{- end -}}
{{- end -}}
{{- $owned := list "--model" "--listen" "--http-listen" "--metrics-listen" "--health-listen" "--tls-cert" "--tls-key" "--tls-client-ca" "--api-keys-file" "--metrics-auth" "--metrics-tls-cert" "--metrics-tls-key" "--metrics-tls-client-ca" "--metrics-token-file" "--tensor-parallel" "--pipeline-parallel" "--workers" "--wire" "--data-plane" "--weights-from" "--on-worker-loss" "--control-tls" "--control-secret-file" "--drain-timeout" "--log-format" "--log-level" "--log-requests" "--config" "--print-config" -}}
{{- range $key, $_ := $v.server -}}
{{- $owned = append $owned (printf "--%s" (kebabcase $key)) -}}
{{- end -}}
{{- range $v.extraArgs -}}
{{- if has (regexFind "^--[^=]+" .) $owned -}}
{{- fail (printf "extraArgs has %s, which the chart sets itself: use its value" .) -}}
{{- end -}}
{{- end -}}

{{- if and $v.tls.clientCa (not $v.tls.secret) -}}
{{- fail "tls.clientCa is true, but tls.secret is empty, expected the Secret with its ca.crt" -}}
{{- end -}}
{{- if and $v.controlTls.secret (eq $layout "pod") -}}
{{- fail (printf "controlTls.secret is %s, but all stages are in one pod: there is nothing to encrypt" $v.controlTls.secret) -}}
{{- end -}}
{{- if and $v.controlSecret.secret (eq $layout "pod") -}}
{{- fail (printf "controlSecret.secret is %s, but all stages are in one pod: there is nobody to prove it to" $v.controlSecret.secret) -}}
{{- end -}}
{{- if and $v.apiKeys.metrics (not $v.apiKeys.secret) -}}
{{- fail "apiKeys.metrics is true, but apiKeys.secret is empty, expected the Secret with the keys" -}}
{{- end -}}
{{- if and $v.apiKeys.metrics $v.metricsToken.secret -}}
{{- fail (printf "apiKeys.metrics is true, but metricsToken.secret is %s: expected one of them" $v.metricsToken.secret) -}}
{{- end -}}
{{- if and $v.metricsTls.clientCa (not $v.metricsTls.secret) -}}
{{- fail "metricsTls.clientCa is true, but metricsTls.secret is empty, expected the Secret with its ca.crt" -}}
{{- end -}}
{{- if $v.serviceMonitor.enabled -}}
{{- $monitor := $v.serviceMonitor -}}
{{- if and (not $v.metricsToken.secret) (ne $v.apiKeys.metrics (not (empty $monitor.authorizationSecret.name))) -}}
{{- fail (printf "apiKeys.metrics is %t, but serviceMonitor.authorizationSecret.name is %q: expected both or none, else Prometheus is refused" $v.apiKeys.metrics $monitor.authorizationSecret.name) -}}
{{- end -}}
{{- if ne $v.metricsTls.clientCa (not (empty $monitor.tls.clientSecret)) -}}
{{- fail (printf "metricsTls.clientCa is %t, but serviceMonitor.tls.clientSecret is %q: expected both or none, else Prometheus is refused" $v.metricsTls.clientCa $monitor.tls.clientSecret) -}}
{{- end -}}
{{- range $name, $value := $monitor.tls -}}
{{- if and $value (not $v.metricsTls.secret) -}}
{{- fail (printf "serviceMonitor.tls.%s is %s, but metricsTls.secret is empty: the metrics port speaks no TLS" $name $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.inferencePool.enabled $v.tls.secret -}}
{{- fail (printf "inferencePool.enabled is true, but tls.secret is %s: a pool's gateway speaks plain HTTP to the pods" $v.tls.secret) -}}
{{- end -}}
{{- range $name, $outside := dict "ingress" $v.ingress "httpRoute" $v.httpRoute -}}
{{- if and $outside.enabled (not $outside.host) -}}
{{- fail (printf "%s.host is empty, expected the name under which clients reach the server, such as chat.example.com" $name) -}}
{{- end -}}
{{- if and $outside.enabled $v.tls.secret -}}
{{- fail (printf "%s.enabled is true, but tls.secret is %s: the proxy ends TLS and speaks plain HTTP to the pods" $name $v.tls.secret) -}}
{{- end -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.gateway.name) -}}
{{- fail "httpRoute.gateway.name is empty, expected the name of a Gateway" -}}
{{- end -}}
{{- if $v.router.enabled -}}
{{- if not $v.router.image -}}
{{- fail "router.image is empty, expected an image with smg, whose entry point takes the flags of smg launch" -}}
{{- end -}}
{{- range $value, $secret := dict "tls.secret" $v.tls.secret "apiKeys.secret" $v.apiKeys.secret -}}
{{- if $secret -}}
{{- fail (printf "router.enabled is true, but %s is %s: the router has neither keys nor certificates for the pods; router.apiKeySecret is for its callers" $value $secret) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq (int $v.service.grpcPort) (int $v.service.metricsPort) -}}
{{- fail (printf "service.metricsPort is %d, the same as service.grpcPort" (int $v.service.metricsPort)) -}}
{{- end -}}
{{- if has (int $v.service.httpPort) (list (int $v.service.grpcPort) (int $v.service.metricsPort)) -}}
{{- fail (printf "service.httpPort is %d, the same as service.grpcPort or service.metricsPort" (int $v.service.httpPort)) -}}
{{- end -}}
{{- $a := $v.autoscaling -}}
{{- if ne $a.kind "none" -}}
{{- if eq $layout "StatefulSet" -}}
{{- fail (printf "autoscaling.kind is %s, but parallelism.topology is StatefulSet, whose groups cannot be scaled as one: use LeaderWorkerSet or SinglePod" $a.kind) -}}
{{- end -}}
{{- if gt (int $a.minReplicas) (int $a.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas is %d, expected at most autoscaling.maxReplicas (%d)" (int $a.minReplicas) (int $a.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $a.kind "KEDA") (not $a.prometheusUrl) -}}
{{- fail "autoscaling.prometheusUrl is empty, expected the Prometheus that KEDA asks, such as http://prometheus:9090" -}}
{{- end -}}
{{- if and $v.inferencePool.enabled (not $v.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.endpointPicker.name is empty, expected the Service of an endpoint picker" -}}
{{- end -}}
{{- end -}}
